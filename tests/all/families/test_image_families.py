"""One model for each further way in which a processor makes placeholders; `make matrix` has all.

Qwen2.5-VL (repeats one) and Idefics3 (tiles with markers) are in the other modules of this folder.
"""

from pathlib import Path

import pytest

from harness.servers import running_server
from tests.all.matrix import images
from tests.all.matrix.image_families import make_image_family
from tests.all.matrix.row import OPTIONS
from tests.kit.models import reference
from tests.kit.trainers.trainer import DEVICE

# Tiles and the whole image; tiles without padding; rows with breaks.
FAMILIES = ("internvl", "llava_onevision", "mistral3")


@pytest.mark.parametrize("family", FAMILIES)
def test_images_and_updates_are_exact(family: str, tmp_path: Path):
    own, image = make_image_family(family, tmp_path / "own", 0)
    other, _ = make_image_family(family, tmp_path / "other", 1)
    options = (*OPTIONS, "--max-model-len", "512", "--weights-root", str(tmp_path))
    with running_server(own, *options, log=tmp_path / "log") as server:
        row = images.Row(server, own, other, image)
        for column in images.COLUMNS.values():
            column(row)


def test_images_that_a_cpu_would_misread_are_refused(tmp_path: Path):
    own, image = make_image_family("gemma3_images", tmp_path / "own", 0)
    with running_server(own, *OPTIONS, log=tmp_path / "log") as server:
        row = images.Row(server, own, own, image)
        body = {"prompts": [row.text], "images": [[images.encoded(one) for one in row.pictures]]}
        answer = server.post("/generate/", {**body, "max_tokens": 1})
        if DEVICE == "cpu":
            assert answer.status_code == 400
            assert (
                "expected no images, because this model's images attend to all of themselves"
                in (answer.json()["error"]["message"])
            )
        else:
            row.check(row.text)
        # Without images the model is exact.
        expected = reference.see(own, "Hello there", [], images.NUM_TOKENS)
        answer = server.generate(
            ["Hello there"], temperature=0, max_tokens=images.NUM_TOKENS,
            generation_kwargs={"ignore_eos": True},
        )  # fmt: skip
        assert answer["completion_ids"] == [expected.completion_ids]
