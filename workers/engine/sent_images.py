"""Sends the tensors of an image to the engine process once, not with each request that has it.

vLLM's engine process keeps the images of the last requests (`--mm-processor-cache-gb`), and takes a
feature without tensors for one that it has. vLLM's own front end drops them where it processes
images; ours are processed elsewhere (`workers/images/`), and n completions are n requests.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

# Of the engine's cache. It evicts in the order of use as here, so what is in the smaller one is in
# the larger one, also where the two measure sizes differently.
SHARE = 0.5


class SentImages:
    """The images that an engine process has, the least recently used first."""

    def __init__(self, capacity: int):
        """`capacity`: bytes of tensors."""
        self._capacity = capacity
        self._num_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def without_sent(self, features: list[Any]) -> list[Any]:
        """vLLM's MultiModalFeatureSpecs of a request that is sent now; those sent before lose their
        tensors."""
        keys = [_key_of(one) for one in features]
        new = {
            key: num_bytes(one.data)
            for key, one in zip(keys, features, strict=True)
            if key not in self._sizes
        }
        if sum(new.values()) > self._capacity:
            # The engine may keep none of them, and drop the others.
            self.forget()
            return features
        for key in filter(self._sizes.__contains__, keys):
            self._sizes.move_to_end(key)
        for key, size in new.items():
            self._sizes[key] = size
            self._num_bytes += size
        while self._num_bytes > self._capacity:
            _, size = self._sizes.popitem(last=False)
            self._num_bytes -= size
        # Of an image that is in the prompt twice, the first takes the tensors along.
        return [
            one if new.pop(key, None) is not None else dataclasses.replace(one, data=None)
            for key, one in zip(keys, features, strict=True)
        ]

    def forget(self) -> None:
        """Sends all images anew: a request that had some has failed, so the engine may lack them."""
        self._sizes.clear()
        self._num_bytes = 0


def send_images_once(llm: Any) -> SentImages:
    """Changes how `llm`, vLLM's AsyncLLM, sends requests, if its engine process keeps images.

    Nothing may call its `reset_mm_cache` then.
    """
    capacity = _capacity(llm.vllm_config)
    core, images = llm.engine_core, SentImages(int(capacity * SHARE))
    if not capacity:
        return images
    send = core.add_request_async

    async def send_once(request: Any) -> None:
        if request.mm_features:
            # Requests arrive in the order in which they pass here.
            request.mm_features = images.without_sent(request.mm_features)
        try:
            await send(request)
        except BaseException:
            images.forget()
            raise

    core.add_request_async = send_once
    return images


def _capacity(vllm_config: Any) -> float:
    """Bytes of the engine process's cache; 0: it has none, or one of another kind."""
    try:
        # vLLM 0.31 and later.
        from vllm.multimodal.cache import engine_receiver_cache_from_config as receiver_cache
    except ImportError:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        receiver_cache = MULTIMODAL_REGISTRY.engine_receiver_cache_from_config
    cache = receiver_cache(vllm_config)
    return float(cache._cache.maxsize) if cache is not None else 0.0


def _key_of(feature: Any) -> str:
    key: str = feature.mm_hash or feature.identifier
    return key


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in vLLM's MultiModalKwargsItem, or in a part of one."""
    if isinstance(value, Mapping):
        return sum(num_bytes(element.data) for element in value.values())
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    return int(getattr(value, "nbytes", 0))
