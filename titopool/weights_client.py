"""The public import path of `titopool/client/weights_client.py`."""

from titopool.client.weights_client import WeightsClient, WeightsError

__all__ = ["WeightsClient", "WeightsError"]
