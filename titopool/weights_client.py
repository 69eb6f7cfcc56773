"""The public import path of `titopool/client/weights_client.py`."""

from titopool.client.weights_client import WeightsClient, WeightsError, join_update

__all__ = ["WeightsClient", "WeightsError", "join_update"]
