"""The processes that prepare prompts with images: what they send, and how they end."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch

from harness.images import file_of, picture
from harness.servers import wait_until
from harness.vision_models import make_qwen_vl
from titopool.errors import GenerationFailed, ImageMismatch, InvalidImage, PromptTooLong
from titopool.wire.messages import Image, Job
from workers.images.exchange import Refused, prepared_type, read_shared, write_shared
from workers.images.placeholders import PlacingProcessor
from workers.images.preparation import Request, prepare
from workers.images.preparer import _digest
from workers.images.processes import ImageProcesses

MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> PlacingProcessor:
    from transformers import AutoTokenizer
    from vllm.config import ModelConfig

    folder: Path = tmp_path_factory.mktemp("qwen")
    make_qwen_vl(folder)
    # A fork has one thread.
    torch.set_num_threads(1)
    config = ModelConfig(model=str(folder), dtype="float32", max_model_len=MAX_MODEL_LEN)
    placing = PlacingProcessor(config, AutoTokenizer.from_pretrained(folder))
    assert placing.learn() is not None
    return placing


@pytest.fixture
def processes(processor: PlacingProcessor) -> Iterator[ImageProcesses]:
    made = ImageProcesses(processor, max_model_len=MAX_MODEL_LEN, number=2, timeout_s=60)
    yield made
    made.close()


def request(
    processor: PlacingProcessor, *files: bytes, text: str = "", num_placeholders: int | None = None
) -> Request:
    number = len(files) if num_placeholders is None else num_placeholders
    ids = processor._encoding.encode(text + "<|vision_start|><|image_pad|><|vision_end|>" * number)
    images = [Image(data, f"image {index}".encode()) for index, data in enumerate(files)]
    return Request(np.array(ids, np.int32).tobytes(), images, {}, [])


def test_a_process_prepares_as_this_one_does(
    processor: PlacingProcessor, processes: ImageProcesses
):
    asked = request(processor, file_of(picture(168, 56, 1)), file_of(picture(56, 56, 2)))
    there, num_bytes = processes.prepare(asked)
    here = prepare(asked, processor, MAX_MODEL_LEN)
    assert there.token_ids == here.token_ids
    assert there.mm_hashes == here.mm_hashes == {"image": ["696d6167652030-12", "696d6167652031-4"]}
    assert there.mm_placeholders == here.mm_placeholders
    assert there.fields == here.fields == {"type": "multimodal"}
    items = list(zip(there.mm_kwargs["image"], here.mm_kwargs["image"], strict=True))
    assert len(items) == 2
    size = 0
    for item, expected in items:
        assert item.keys() == expected.keys()
        for name, element in expected.items():
            assert torch.equal(item[name].data, element.data)
            assert type(item[name].field) is type(element.field)
            size += element.data.nbytes
    assert size <= num_bytes < size + 4096
    assert there.elapsed_s >= there.decode_s > 0


def test_a_mask_of_a_placeholder_survives():
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    mask = torch.tensor([True, False, True])
    sent = prepared_type()(
        token_ids=b"", fields={}, mm_kwargs=MultiModalKwargsItems(), mm_hashes={},
        mm_placeholders={"image": [PlaceholderRange(3, 3, mask), PlaceholderRange(9, 1)]},
        decode_s=0.0, elapsed_s=0.0,
    )  # fmt: skip
    descriptor = write_shared(sent)
    got, _ = read_shared(descriptor)
    os.close(descriptor)
    first, second = got.mm_placeholders["image"]
    assert torch.equal(first.is_embed, mask)
    assert (second.offset, second.length, second.is_embed) == (9, 1, None)


def test_shared_memory_is_freed_with_its_last_tensor():
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
    )

    field = MultiModalFieldConfig.batched("image").field
    pixels = MultiModalFieldElem(data=torch.arange(1_000_000), field=field)
    kwargs = MultiModalKwargsItems({"image": [MultiModalKwargsItem({"pixels": pixels})]})
    descriptor = write_shared(prepared_type()(b"", {}, kwargs, {}, {}, decode_s=0.0, elapsed_s=0.0))
    got, num_bytes = read_shared(descriptor)
    os.close(descriptor)
    assert num_bytes >= 8_000_000
    tensor = got.mm_kwargs["image"][0]["pixels"].data
    del got
    assert int(tensor[-1]) == 999_999
    assert "titopool-images" in Path("/proc/self/maps").read_text()
    assert not any("titopool-images" in target for target in map(os.path.realpath, fds()))
    del tensor
    assert "titopool-images" not in Path("/proc/self/maps").read_text()


def fds() -> list[str]:
    return [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]


def test_a_refusal_survives():
    descriptor = write_shared(Refused("invalid_image", "expected …", "images"))
    assert read_shared(descriptor)[0] == Refused("invalid_image", "expected …", "images")
    os.close(descriptor)


def test_what_is_refused_leaves_the_process_as_it_is(
    processor: PlacingProcessor, processes: ImageProcesses
):
    good = file_of(picture(56, 56, 1))
    pids = [one.pid for one in processes._helpers]
    cases = [
        (request(processor, good[:-40]), InvalidImage, "image 0: expected a complete image file"),
        (request(processor, good, num_placeholders=2), ImageMismatch, "for each of 1 images"),
        (request(processor, good, text="word " * 80), PromptTooLong, "expected at most 63 tokens"),
    ]
    for asked, kind, words in cases:
        with pytest.raises(kind, match=words):
            processes.prepare(asked)
    assert processes.prepare(request(processor, good))[0].token_ids
    assert [one.pid for one in processes._helpers] == pids


def test_a_process_that_ended_while_idle_costs_nobody_anything(
    processor: PlacingProcessor, processes: ImageProcesses
):
    asked = request(processor, file_of(picture(56, 56, 1)))
    for helper in processes._helpers:
        os.kill(helper.pid, signal.SIGKILL)
    for _ in range(3):
        assert processes.prepare(asked)[0].token_ids


OTHER = {
    "prompt_token_ids": bytes(8), "images": [Image(b"", b"other")],
    "mm_processor_kwargs": {"max_pixels": 1}, "image_ranges": [(0, 1)],
}  # fmt: skip


@pytest.mark.parametrize("name", Request.__struct_fields__)
def test_prompts_that_are_prepared_otherwise_share_no_preparation(name: str):
    job = Job(1, 1, bytes(4), 1, 8, msgspec.Raw(), images=[Image(b"", b"one")])
    other = msgspec.structs.replace(job, **{name: OTHER[name]})
    assert _digest(other) != _digest(job) == _digest(msgspec.structs.replace(job, job_id=2))


class Deadly:
    """A processor that a prompt of one id ends, and one of two ids stops for ever."""

    def __init__(self, processor: PlacingProcessor):
        self._processor = processor

    def apply(self, token_ids: list[int], *arguments: object) -> object:
        if len(token_ids) == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        while len(token_ids) == 2:
            time.sleep(1)
        return self._processor.apply(token_ids, *arguments)


def test_a_prompt_that_ends_its_process_fails_alone(processor: PlacingProcessor):
    processes = ImageProcesses(
        Deadly(processor), max_model_len=MAX_MODEL_LEN, number=1, timeout_s=60
    )
    try:
        with pytest.raises(GenerationFailed, match="ended twice"):
            processes.prepare(Request(bytes(4), [], {}, []))
        asked = request(processor, file_of(picture(56, 56, 1)))
        assert processes.prepare(asked)[0].token_ids
    finally:
        processes.close()


def test_a_process_that_hangs_is_replaced(processor: PlacingProcessor):
    processes = ImageProcesses(processor, max_model_len=MAX_MODEL_LEN, number=1, timeout_s=1)
    asked = request(processor, file_of(picture(56, 56, 1)))
    hung = processes._helpers[0].pid
    os.kill(hung, signal.SIGSTOP)
    try:
        with pytest.raises(GenerationFailed, match="had no answer in time"):
            processes.prepare(asked)
        wait_until(lambda: not psutil.pid_exists(hung), 10)
        processes._timeout_s = 60
        assert processes.prepare(asked)[0].token_ids
    finally:
        processes.close()


def test_closing_ends_a_call_that_waits(processor: PlacingProcessor):
    processes = ImageProcesses(processor, max_model_len=MAX_MODEL_LEN, number=1, timeout_s=60)
    os.kill(processes._helpers[0].pid, signal.SIGSTOP)
    failures: list[Exception] = []

    def ask() -> None:
        try:
            processes.prepare(request(processor, file_of(picture(56, 56, 1))))
        except GenerationFailed as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    processes.close()
    thread.join(10)
    assert failures


def test_the_processes_end_with_their_worker(processor: PlacingProcessor):
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        # A worker, which is killed.
        made = ImageProcesses(
            Deadly(processor), max_model_len=MAX_MODEL_LEN, number=2, timeout_s=60
        )
        endless = Request(bytes(8), [], {}, [])
        threading.Thread(target=made.prepare, args=(endless,), daemon=True).start()
        time.sleep(1)
        os.write(write, " ".join(str(one.pid) for one in made._helpers).encode())
        signal.pause()
    pids = list(map(int, os.read(read, 100).split()))
    for pid in pids:
        wait_until(
            lambda pid=pid: psutil.Process(pid).cmdline()[0].startswith("titopool::images"), 10
        )
    # One is idle, one in the midst of a prompt.
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    for pid in pids:
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), 10)
    os.close(read)
    os.close(write)
