"""Servers of tiny vision-language models for the tests in this folder."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from harness import vision_models
from harness.images import PLACEHOLDERS
from harness.servers import KV_CACHE, Server, running_server
from tests.kit.models import reference
from titopool.settings.gpus import visible_gpus

# On a GPU, attention and convolutions multiply float32 with a mantissa of 10 bits (TF32).
TOLERANCE = 2e-2 if visible_gpus() else 1e-3
NUM_TOKENS = 12
OPTIONS = (
    *KV_CACHE,
    "--dtype",
    "float32",
    "--max-model-len",
    "1024",
    "--limit-mm-per-prompt",
    '{"image": 6}',
)
if visible_gpus():
    OPTIONS += ("--gpu-memory-utilization", "0.2")
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "generation_kwargs": {"ignore_eos": True}}


@dataclass
class Vision:
    """A server of a vision-language model, and the model's folder."""

    server: Server
    folder: str
    placeholder: str

    def see(self, text: str, images: list, **kwargs) -> reference.SeenWithImages:
        return reference.see(self.folder, self.text(text), images, NUM_TOKENS, **kwargs)

    def text(self, text: str) -> str:
        """`text` with the model's placeholder for each `@`."""
        return text.replace("@", self.placeholder)

    def ids(self, text: str) -> list[int]:
        """Token ids with one placeholder for each image."""
        processor, _ = reference.vision_model(self.folder)
        return processor.tokenizer(self.text(text))["input_ids"]


def vision(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    folder = tmp_path_factory.mktemp(kind)
    {"qwen": vision_models.make_qwen_vl, "smol": vision_models.make_smol_vlm}[kind](folder)
    log = tmp_path_factory.mktemp("vision-server") / "log"
    options = ["--num-workers", "1", "--num-front-ends", "2", *OPTIONS]
    if kind == "smol":
        # So little memory that only one prompt with images runs at a time.
        options += ["--image-memory-bytes", "1"]
    with running_server(str(folder), *options, log=log) as server:
        yield Vision(server, str(folder), PLACEHOLDERS[kind])


@pytest.fixture(scope="package")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    yield from vision("qwen", tmp_path_factory)


@pytest.fixture(scope="package")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    yield from vision("smol", tmp_path_factory)


@pytest.fixture(scope="package", params=["qwen", "smol"])
def model(request: pytest.FixtureRequest) -> Vision:
    return request.getfixturevalue(request.param)
