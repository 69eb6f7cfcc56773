"""An image's tensors go to the engine process once: which requests carry them."""

import asyncio
import dataclasses
import json
import random
import subprocess
import sys
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from harness import vision_models
from harness.servers import REPOSITORY, environment
from workers.engine import sent_images
from workers.engine.sent_images import SentImages, num_bytes


@dataclasses.dataclass
class Feature:
    data: dict | None
    identifier: str
    mm_hash: str | None = None


def feature(name: str, size: int) -> Feature:
    tensor = SimpleNamespace(data=torch.zeros(size, dtype=torch.uint8))
    return Feature({"pixels": tensor}, "lora-" + name, name)


class Engine:
    """As vLLM's receiver cache (`MultiModalCache`): an LRU of bytes; items that do not fit are not kept."""

    def __init__(self, capacity: int):
        self._capacity, self._kept = capacity, OrderedDict()

    def receive(self, features: list[Feature]) -> None:
        for one in features:
            if one.mm_hash in self._kept:
                self._kept.move_to_end(one.mm_hash)
        for one in features:
            if one.data is None:
                assert one.mm_hash in self._kept, one.mm_hash
                self._kept.move_to_end(one.mm_hash)
                continue
            self._kept.pop(one.mm_hash, None)
            if num_bytes(one.data) <= self._capacity:
                self._kept[one.mm_hash] = num_bytes(one.data)
            while sum(self._kept.values()) > self._capacity:
                self._kept.popitem(last=False)


def test_tensors_go_with_the_first_request_only():
    images = SentImages(100)
    one, two = feature("one", 60), feature("two", 30)
    assert images.without_sent([one, two, one]) == [one, two, dataclasses.replace(one, data=None)]
    assert [item.data for item in images.without_sent([two, one])] == [None, None]
    # The caller's features stay: n completions share them.
    assert one.data is not None


def test_the_least_recently_used_image_is_sent_again():
    images = SentImages(100)
    for name in ("old", "new"):
        images.without_sent([feature(name, 50)])
    images.without_sent([feature("old", 50)])
    images.without_sent([feature("third", 50)])
    assert images.without_sent([feature("new", 50)])[0].data is not None


def test_all_are_sent_again_after_a_failure():
    images, one = SentImages(100), feature("one", 60)
    images.without_sent([one])
    images.forget()
    assert images.without_sent([one]) == [one]
    assert images.without_sent([one])[0].data is None


def test_the_bytes_of_vllm_s_items_are_counted():
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    field = MultiModalFieldConfig.batched("image").field
    nested = [torch.zeros(3), torch.zeros(2, 2)]
    item = MultiModalKwargsItem(
        {
            "pixels": MultiModalFieldElem(data=torch.zeros(10), field=field),
            "crops": MultiModalFieldElem(data=nested, field=field),
            "number": MultiModalFieldElem(data=3, field=field),
        }
    )
    assert num_bytes(item) == 4 * (10 + 3 + 4)


def test_a_request_larger_than_the_cache_is_sent_whole():
    images = SentImages(100)
    images.without_sent([feature("small", 10)])
    large = [feature("small", 10), feature("a", 60), feature("b", 60)]
    assert images.without_sent(large) == large
    assert images.without_sent([feature("small", 10)])[0].data is not None


@pytest.mark.parametrize("seed", range(20))
def test_the_engine_has_every_image_that_is_sent_without_tensors(seed: int):
    numbers = random.Random(seed)
    sizes = {f"image {index}": numbers.choice((1, 10, 30, 30, 70, 120)) for index in range(8)}
    # Twice as large, as `SHARE` says.
    images, engine = SentImages(100), Engine(200)
    num_slim = 0
    for _ in range(500):
        names = numbers.choices(list(sizes), k=numbers.randint(1, 4))
        sent = images.without_sent([feature(name, sizes[name]) for name in names])
        num_slim += sum(one.data is None for one in sent)
        engine.receive(sent)
    assert num_slim > 20


def test_what_vllm_s_client_sends_has_the_tensors_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sent_images, "_capacity", lambda vllm_config: 1000.0)
    received: list[bool] = []

    async def send(request: SimpleNamespace) -> None:
        received.extend(item.data is None for item in request.mm_features)
        if request.is_bad:
            raise OSError("the engine is gone")

    core = SimpleNamespace(add_request_async=send)
    sent_images.send_images_once(SimpleNamespace(vllm_config=None, engine_core=core))

    def ask(*, is_bad: bool = False) -> None:
        features = [feature("one", 60)]
        asyncio.run(core.add_request_async(SimpleNamespace(mm_features=features, is_bad=is_bad)))

    for _ in range(3):
        ask()
    with pytest.raises(OSError, match="gone"):
        ask(is_bad=True)
    ask()
    # The engine may have lost what it had.
    assert received == [False, True, True, True, False]


@pytest.mark.variant
def test_an_image_is_seen_by_requests_that_do_not_carry_it(tmp_path):
    """Real vLLM: n completions, and later requests of the same image."""
    folder = tmp_path / "model"
    folder.mkdir()
    vision_models.make_qwen_vl(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.workers.images_in_engine", str(folder)], stdout=subprocess.PIPE,
        text=True, cwd=REPOSITORY, env=environment(), timeout=200, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    one, three, four, again = found["completions"]
    assert (len(three), len(four)) == (3, 4)
    assert four == one * 4
    assert three == again * 3
    assert one != again
    assert found["were_slim"] == [False, *[False, True, True], *[True] * 4, True]
