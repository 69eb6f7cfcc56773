"""Clients for rollouts: one answers with completions that a test has written, one asks a server."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import requests


@dataclass
class Written:
    """A completion."""

    ids: np.ndarray
    finish_reason: str = "stop"
    weight_versions: Sequence[tuple[int, int]] = ((0, 0),)
    logprobs: Any = None

    def __post_init__(self):
        if self.logprobs is None:
            self.logprobs = -(1 + np.arange(len(self.ids), dtype=np.float32))


@dataclass
class Answer:
    prompt_ids: np.ndarray
    completions: tuple[Written, ...]
    # Offset and length of each image.
    image_ranges: Any = None


@dataclass
class WritingClient:
    """Answers each call of `generate` with the next completion, and keeps the calls."""

    completions: list[Written]
    prompts: list[list[int]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def generate(self, prompts: Any, **options: Any) -> list[Answer]:
        (prompt,) = prompts
        self.prompts.append(list(prompt))
        self.calls.append(options)
        return [Answer(np.asarray(prompt, np.int32), (self.completions.pop(0),))]


def written(tokenizer: Any, text: str, finish_reason: str = "stop", **options: Any) -> Written:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Written(np.array(ids, np.int32), finish_reason, **options)


class ServerClient:
    """The calls of a rollout over plain HTTP; keeps the prompts."""

    def __init__(self, url: str):
        self.url = url
        self.prompts: list[list[int]] = []

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        answer = requests.post(self.url + path, json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate(self, prompts: Any, *, session_id: str, **options: Any) -> list[Answer]:
        known = ("images", "n", "max_tokens", "temperature")
        body = {name: options.pop(name) for name in known if name in options}
        sent = [np.asarray(prompt).tolist() for prompt in prompts]
        self.prompts += sent
        found = self.post(
            "/generate/",
            {"prompts": sent, **body, "generation_kwargs": options},
            **{"X-Session-ID": session_id, "X-Request-ID": session_id},
        )
        n = body.get("n", 1)
        completions = [
            Written(
                np.array(ids, np.int32),
                reason,
                [tuple(span) for span in spans],
                np.array(logprobs, np.float32).reshape(len(ids)),
            )
            for ids, reason, spans, logprobs in zip(
                found["completion_ids"], found["finish_reasons"], found["weight_versions"],
                found["logprobs"], strict=True,
            )
        ]  # fmt: skip
        return [
            Answer(
                np.array(ids, np.int32),
                tuple(completions[index * n : (index + 1) * n]),
                (found.get("image_ranges") or [None] * len(prompts))[index],
            )
            for index, ids in enumerate(found["prompt_ids"])
        ]

    def render(
        self, messages: Any, *, tools=None, chat_template_kwargs=None, **options: Any
    ) -> Any:
        body = {"messages": messages, **options}
        if tools:
            body |= {"tools": tools, "tool_choice": "none"}
        if chat_template_kwargs:
            body["chat_template_kwargs"] = chat_template_kwargs
        return np.array(self.post("/v1/chat/completions/render", body)["token_ids"], np.int32)

    def detokenize(self, ids: Any) -> str:
        return self.post("/detokenize", {"tokens": ids})["prompt"]

    def tokenize(self, text: str) -> Any:
        return self.post("/tokenize", {"prompt": text})["tokens"]
