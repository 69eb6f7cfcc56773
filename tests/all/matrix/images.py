"""Columns of the matrix for models that see images, against transformers."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from harness.servers import Server
from tests.all.matrix.text import NUM_TOKENS, assert_close, flat
from tests.kit.models import reference
from tests.kit.models.weights import weights_client

# Width and height: one tile or several, and sizes that no patch divides.
SIZES = ((90, 60), (56, 56), (130, 45))


@dataclass
class Row:
    """A running server, the folder of its model, one with other weights, and an image's text."""

    server: Server
    own: str
    other: str
    image: str

    @property
    def text(self) -> str:
        return f"Compare {self.image} with {self.image} please"

    @cached_property
    def pictures(self) -> list[Image.Image]:
        return [picture(*size) for size in SIZES[:2]]

    @cached_property
    def expected(self) -> reference.SeenWithImages:
        return reference.see(self.own, self.text, self.pictures, NUM_TOKENS)

    def check(self, prompt: Any, expected: reference.SeenWithImages | None = None) -> None:
        """The answer to `prompt` with the pictures is transformers'."""
        expected = expected or self.expected
        answer = self.server.generate(
            [prompt], images=[[encoded(one) for one in self.pictures]], temperature=0,
            max_tokens=NUM_TOKENS, logprobs=0, generation_kwargs={"ignore_eos": True},
        )  # fmt: skip
        assert answer["prompt_ids"] == [expected.prompt_ids], "other prompt ids"
        assert answer["completion_ids"] == [expected.completion_ids], "other ids"
        assert_close(flat(answer["logprobs"][0]), expected.logprobs)


def picture(width: int, height: int) -> Image.Image:
    made = np.random.RandomState(width).rand(height, width, 3)
    return Image.fromarray((made * 255).astype("uint8"))


def encoded(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def column_text(row: Row) -> None:
    row.check(row.text)


def column_single(row: Row) -> None:
    """Ids with one placeholder for each image, as a tokenizer makes them."""
    processor, _ = reference.vision_model(row.own)
    row.check(processor.tokenizer(row.text)["input_ids"])


def column_expanded(row: Row) -> None:
    """Ids that were expanded before."""
    row.check(row.expected.prompt_ids)


def column_again(row: Row) -> None:
    """The same prompt a second time: caches of images and prefixes."""
    row.check(row.text)


def column_wire(row: Row) -> None:
    """A chat that is rendered to ids and features, and generated from those."""
    before, between, after = row.text.split(row.image)
    parts = [
        words(before),
        seen(row.pictures[0]),
        words(between),
        seen(row.pictures[1]),
        words(after),
    ]
    server = row.server
    body = server.post(
        "/v1/chat/completions/render", {"messages": [{"role": "user", "content": parts}]}
    )
    assert body.status_code == 200, body.text
    rendered = body.json()
    assert rendered["token_ids"] == row.expected.prompt_ids, "other rendered ids"
    rendered["sampling_params"] = {
        "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0,
    }  # fmt: skip
    answer = server.post("/inference/v1/generate", rendered)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == row.expected.completion_ids, "other ids"
    assert_close([one["logprob"] for one in choice["logprobs"]["content"]], row.expected.logprobs)


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def seen(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(image)}"}}


def column_update(row: Row) -> None:
    """Weights by the names of the trainer's module there, and back from the folder."""
    model = AutoModelForImageTextToText.from_pretrained(row.other, dtype=torch.float32)
    with weights_client(row.server) as client:
        client.update(list(model.state_dict().items()), policy="drain")
    row.check(row.text, reference.see(row.other, row.text, row.pictures, NUM_TOKENS))
    answer = row.server.post("/update_weights", {"path": row.own, "policy": "drain"})
    assert answer.status_code == 200, answer.text
    row.check(row.text)


COLUMNS: dict[str, Callable[[Row], None]] = {
    "images as text": column_text,
    "single placeholders": column_single,
    "expanded placeholders": column_expanded,
    "images again": column_again,
    "rendered": column_wire,
    "update": column_update,
}
