"""The trainer's client under the name that trainers import: see `titopool/client/weights_client.py`."""

from titopool.client.weights_client import WeightsClient, WeightsError

__all__ = ["WeightsClient", "WeightsError"]
