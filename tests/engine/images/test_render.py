"""Images by /render and /inference/v1/generate: the same as /generate/ with the file, in real vLLM."""

import base64
import copy
import json
from hashlib import sha256
from typing import Any

import numpy as np
import PIL.Image
import pytest

from harness.images import encoded, file_of, picture
from tests.engine.images.conftest import NUM_TOKENS, TOLERANCE, Vision
from tests.kit.peers.vllm_protocol import GENERATE, read_by_vllm

RENDER = "/v1/chat/completions/render"
PREFIX = "titopool-image:1:"
SMALL, WIDE, LARGE = picture(56, 56, 1), picture(168, 56, 2), picture(200, 140, 3)
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0}


def image_part(image: PIL.Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + encoded(image)}}


def conversation(*parts: PIL.Image.Image | str) -> list[dict[str, Any]]:
    """One message of the user with images and texts."""
    content = [
        {"type": "text", "text": one} if isinstance(one, str) else image_part(one) for one in parts
    ]
    return [{"role": "user", "content": content}]


def text_of(*parts: PIL.Image.Image | str) -> str:
    """The same in the chat template of the tiny Qwen, with `@` for an image."""
    inner = "".join(one if isinstance(one, str) else "@" for one in parts)
    return f"<|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n"


def rendered(model: Vision, *parts: PIL.Image.Image | str, **fields: Any) -> dict[str, Any]:
    answer = model.server.post(RENDER, {"messages": conversation(*parts), **fields})
    assert answer.status_code == 200, answer.text
    read_by_vllm("GenerateRequest", answer.content)
    body: dict[str, Any] = answer.json()
    return body


def generated(model: Vision, body: dict[str, Any]) -> dict[str, Any]:
    answer = model.server.post(GENERATE, body)
    assert answer.status_code == 200, answer.text
    read_by_vllm("GenerateResponse", answer.content)
    found: dict[str, Any] = answer.json()
    return found


def by_generate(model: Vision, ids: list[int], images: list, n: int = 1, seed: int | None = None):
    """/generate/ with the files: ids and log-probabilities of each completion."""
    kwargs = {"ignore_eos": True} if seed is None else {"ignore_eos": True, "seed": seed}
    answer = model.server.generate(
        [ids], images=[[encoded(one) for one in images]], n=n, max_tokens=NUM_TOKENS,
        temperature=0 if seed is None else 1, generation_kwargs=kwargs,
    )  # fmt: skip
    rows = [[entries[0] for entries in one] for one in answer["logprobs"]]
    return answer["prompt_ids"][0], answer["completion_ids"], rows


def of_choices(found: dict[str, Any]):
    choices = found["choices"]
    values = [[one["logprob"] for one in choice["logprobs"]["content"]] for choice in choices]
    return [choice["token_ids"] for choice in choices], values


def runs_of(ids: list[int], token_id: int) -> list[dict[str, int]]:
    """The runs of one id, as TRL searches them."""
    is_one = np.concatenate(([0], np.array(ids) == token_id, [0]))
    begins, ends = np.flatnonzero(np.diff(is_one) == 1), np.flatnonzero(np.diff(is_one) == -1)
    return [
        {"offset": int(begin), "length": int(end - begin)}
        for begin, end in zip(begins, ends, strict=True)
    ]


PROMPTS = {
    "one": (WIDE, " what?"),
    "two": ("Compare ", WIDE, " with ", LARGE, " now"),
    "adjacent": (SMALL, WIDE, SMALL, "which?"),
    "images-only": (SMALL, LARGE),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_render_and_generate_equal_generate_with_the_file(qwen: Vision, name: str):
    parts = PROMPTS[name]
    images = [one for one in parts if not isinstance(one, str)]
    body = rendered(qwen, *parts, **{**GREEDY, "logprobs": True})
    single = qwen.ids(text_of(*parts))
    ids, completions, logprobs = by_generate(qwen, single, images)
    assert body["token_ids"] == ids == qwen.see(text_of(*parts), images).prompt_ids
    features = body["features"]
    assert features["mm_hashes"]["image"] == [sha256(file_of(one)).hexdigest() for one in images]
    assert features["kwargs_data"]["image"] == [PREFIX + encoded(one) for one in images]
    (placeholder,) = set(qwen.ids("@")) - set(qwen.ids("<|vision_start|><|vision_end|>"))
    assert features["mm_placeholders"]["image"] == runs_of(ids, placeholder)
    chat = {"messages": conversation(*parts), "max_tokens": 1, "return_token_ids": True}
    asked = qwen.server.post("/v1/chat/completions", chat).json()
    assert body["token_ids"] == asked["prompt_token_ids"]
    assert body["sampling_params"] == {
        "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0
    }  # fmt: skip
    found = generated(qwen, {**body, "return_token_ids": True})
    assert found["prompt_token_ids"] == ids
    assert found["mm_placeholders"] == features["mm_placeholders"]
    assert found["usage"]["prompt_tokens"] == len(ids)
    found_ids, values = of_choices(found)
    assert found_ids == completions
    assert values[0] == pytest.approx(logprobs[0], abs=1e-5)
    plain = generated(qwen, body)
    assert (plain["prompt_token_ids"], plain["mm_placeholders"]) == (None, None)
    # Unexpanded ids with the images beside them, as renderers sends them.
    urls = [{"type": "image_url", "url": "data:image/png;base64," + encoded(one)} for one in images]
    by_parts = {"token_ids": single, "content_parts": urls, "sampling_params": GREEDY}
    found = generated(qwen, by_parts)
    assert found["prompt_token_ids"] == ids
    assert found["mm_placeholders"] == features["mm_placeholders"]
    assert of_choices(found)[0] == completions


def test_seeded_completions_equal_those_of_generate(qwen: Vision):
    parts = ("a ", LARGE, " b ", SMALL)
    body = rendered(
        qwen, *parts, n=3, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True
    )
    _, completions, logprobs = by_generate(
        qwen, qwen.ids(text_of(*parts)), [LARGE, SMALL], n=3, seed=7
    )
    found = generated(qwen, body)
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    ids, values = of_choices(found)
    assert ids == completions
    assert len(set(map(tuple, ids))) == 3
    for row, expected in zip(values, logprobs, strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


def test_features_may_be_placed_in_the_trainer_s_own_ids(qwen: Vision):
    # As TRL's client does: a render of the images alone, with their ranges replaced.
    body = rendered(qwen, WIDE, LARGE, max_tokens=1)
    expected = qwen.see("Compare @ with @ now", [WIDE, LARGE])
    (placeholder,) = set(qwen.ids("@")) - set(qwen.ids("<|vision_start|><|vision_end|>"))
    runs = runs_of(expected.prompt_ids, placeholder)
    features = body["features"]
    assert runs != features["mm_placeholders"]["image"]
    features = {**features, "mm_placeholders": {**features["mm_placeholders"], "image": runs}}
    found = generated(
        qwen,
        {
            "request_id": "trl-1", "model": body["model"], "token_ids": expected.prompt_ids,
            "features": features, "sampling_params": {**GREEDY, "output_kind": 2},
        },
    )  # fmt: skip
    ids, values = of_choices(found)
    assert ids == [expected.completion_ids]
    assert values[0] == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_a_family_with_rows_of_markers_has_its_own_ranges(smol: Vision):
    text, images = "What is @ next to @?", [LARGE, SMALL]
    urls = [{"type": "image_url", "url": "data:image/png;base64," + encoded(one)} for one in images]
    expected = smol.see(text, images)
    found = generated(
        smol, {"token_ids": smol.ids(text), "content_parts": urls, "sampling_params": GREEDY}
    )
    assert found["prompt_token_ids"] == expected.prompt_ids
    assert of_choices(found)[0] == [expected.completion_ids]
    files = [file_of(one) for one in images]
    features = {
        "mm_hashes": {"image": [sha256(one).hexdigest() for one in files]},
        "mm_placeholders": found["mm_placeholders"],
        "kwargs_data": {"image": [PREFIX + base64.b64encode(one).decode() for one in files]},
    }
    body = {"token_ids": expected.prompt_ids, "features": features, "sampling_params": GREEDY}
    again = generated(smol, body)
    assert of_choices(again)[0] == [expected.completion_ids]


def test_a_stream_begins_with_the_prompt_and_its_images(qwen: Vision):
    body = rendered(qwen, "see ", LARGE, **{**GREEDY, "logprobs": True})
    whole = generated(qwen, {**body, "return_token_ids": True})
    answer = qwen.server.post(GENERATE, {**body, "return_token_ids": True, "stream": True})
    first, *others = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    for key in ("prompt_token_ids", "mm_placeholders"):
        assert first[key] == whole[key] is not None
        assert not any(one.get(key) for one in others)
    ids = [i for one in (first, *others) for i in one["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]


def test_prompt_logprobs_cover_the_expanded_prompt(qwen: Vision):
    body = rendered(qwen, "see ", WIDE, " now", max_tokens=1, prompt_logprobs=1, temperature=0)
    found = generated(qwen, body)["prompt_logprobs"]
    ids = body["token_ids"]
    assert len(found) == len(ids)
    assert found[0] is None
    for token_id, entries in zip(ids[1:], found[1:], strict=True):
        assert next(iter(entries)) == str(token_id)
    chat = {
        "messages": conversation("see ", WIDE, " now"), "max_tokens": 1, "prompt_logprobs": 1,
        "temperature": 0,
    }  # fmt: skip
    expected = qwen.server.post("/v1/chat/completions", chat).json()["prompt_logprobs"]
    own = [entries[str(one)]["logprob"] for one, entries in zip(ids[1:], found[1:], strict=True)]
    theirs = [one[str(i)]["logprob"] for i, one in zip(ids[1:], expected[1:], strict=True)]
    assert own == pytest.approx(theirs, abs=TOLERANCE)


def test_arguments_of_the_processor_are_taken_over(qwen: Vision):
    kwargs = {"max_pixels": 28 * 28 * 8}
    body = rendered(qwen, LARGE, max_tokens=4, mm_processor_kwargs=kwargs)
    assert body["mm_processor_kwargs"] == kwargs
    assert len(body["token_ids"]) < len(rendered(qwen, LARGE)["token_ids"])
    assert generated(qwen, body)["usage"]["prompt_tokens"] == len(body["token_ids"])
    del body["mm_processor_kwargs"]
    refused = qwen.server.post(GENERATE, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "image_mismatch")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_the_payload_is_little_more_than_the_file(qwen: Vision, kind: str):
    image = picture(300, 200, 9)
    file = file_of(image, kind)
    assert len(file) > 16_000
    url = f"data:image/{kind.lower()};base64," + base64.b64encode(file).decode()
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    answer = qwen.server.post(RENDER, {"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert len(answer.content) < 1.4 * len(file)


def test_a_render_runs_nothing_and_needs_no_running_engine(qwen: Vision):
    expected = rendered(qwen, LARGE, "what?")
    paused = qwen.server.post("/pause", {"mode": "keep", "lease_s": 60})
    assert paused.status_code == 200, paused.text
    try:
        found = rendered(qwen, LARGE, "what?")
    finally:
        assert qwen.server.post("/resume", {}).status_code == 200
    assert found["token_ids"] == expected["token_ids"]
    assert found["features"] == expected["features"]


def test_a_text_has_no_features(qwen: Vision):
    body = rendered(qwen, "only text")
    assert body["features"] is None
    assert body["token_ids"] == qwen.ids(text_of("only text"))
    assert body["sampling_params"] == {"max_tokens": 1024 - len(body["token_ids"])}


def with_entry(path: str, value: Any, token_ids: list[int] | None = None):
    """A change of a rendered body: one entry of `features`, and the ids."""

    def change(body: dict[str, Any]) -> None:
        body["token_ids"] = token_ids or body["token_ids"]
        *way, last = path.split(".")
        inner: Any = body["features"]
        for step in way:
            inner = inner[int(step) if step.isdigit() else step]
        inner[int(last) if last.isdigit() else last] = value

    return change


def shifted(key: str, number: int, by: int):
    def change(body: dict[str, Any]) -> None:
        body["features"]["mm_placeholders"]["image"][number][key] += by

    return change


def collapse(body: dict[str, Any]) -> None:
    """Single placeholders in the ids, the ranges as before, and as many tokens."""
    ids = body["token_ids"]
    placeholder = ids[body["features"]["mm_placeholders"]["image"][0]["offset"]]
    kept = [one for at, one in enumerate(ids) if one != placeholder or ids[at - 1] != placeholder]
    body["token_ids"] = kept + ids[-1:] * (len(ids) - len(kept))


def collapse_with_ranges(body: dict[str, Any]) -> None:
    """Single placeholders in the ids, and their ranges."""
    collapse(body)
    placeholders = body["features"]["mm_placeholders"]
    placeholders["image"] = runs_of(
        body["token_ids"], body["token_ids"][placeholders["image"][0]["offset"]]
    )


def with_content_parts(body: dict[str, Any]) -> None:
    body["content_parts"] = [{"type": "image_url", "url": "data:image/png;base64,AA=="}]


PNG = encoded(SMALL)
BAD = {
    # name of the case: (change of the body, code, parts of the message)
    "tensors": (with_entry("kwargs_data.image.0", "gqVpbWFnZQ=="), "invalid_image", ("kwargs_data.image[0]", PREFIX, "gqVpbWFnZQ", "content_parts")),
    "of-the-cache": (with_entry("kwargs_data.image.1", None), "invalid_image", ("kwargs_data.image[1]", "got null")),
    "no-data": (with_entry("kwargs_data", None), "invalid_image", ("features.kwargs_data.image[0]", "got null")),
    "no-base64": (with_entry("kwargs_data.image.0", PREFIX + "%"), "invalid_image", ("kwargs_data.image[0]", "base64")),
    "no-image": (with_entry("kwargs_data.image.0", PREFIX + "aGVsbG8="), "invalid_image", ("kwargs_data.image[0]", "not an image")),
    "fewer-hashes": (with_entry("mm_hashes.image", ["a"]), "invalid_request", ("1 in mm_hashes, 2 in mm_placeholders, 2 in kwargs_data",)),
    "fewer-ranges": (with_entry("mm_placeholders.image", []), "invalid_request", ("0 in mm_placeholders",)),
    "other-file": (with_entry("kwargs_data.image.0", PREFIX + PNG), "invalid_request", ("mm_hashes.image[0]", "sha256", sha256(base64.b64decode(PNG)).hexdigest())),
    "video": (with_entry("mm_hashes.video", ["a"]), "invalid_request", ("features.mm_hashes", "`video`")),
    "metadata": (with_entry("mm_metadata", {"image": [None, None]}), "invalid_request", ("features.mm_metadata",)),
    "outside": (shifted("offset", 1, 10_000), "invalid_request", ("mm_placeholders.image[1]", "within the", "length")),
    "too-long": (shifted("length", 1, 10_000), "invalid_request", ("mm_placeholders.image[1]", "within the")),
    "overlapping": (shifted("length", 0, 12), "invalid_request", ("mm_placeholders.image[1]", "at least", "got offset")),
    "negative": (shifted("offset", 0, -1000), "invalid_request", ("mm_placeholders.image[0].offset", ">= 0")),
    "empty": (with_entry("mm_placeholders.image.0.length", 0), "invalid_request", ("mm_placeholders.image[0].length",)),
    "shifted": (shifted("offset", 0, -1), "image_mismatch", ("image 0", "its size needs", "got offset")),
    "short": (shifted("length", 1, -1), "image_mismatch", ("image 1", "its size needs", "length 34")),
    "swapped": (lambda body: [one.reverse() for one in (body["features"]["kwargs_data"]["image"], body["features"]["mm_hashes"]["image"])], "image_mismatch", ("as their sizes need", "in runs of")),
    "unexpanded": (collapse, "image_mismatch", ("expected ids with all placeholders", "single")),
    "single": (collapse_with_ranges, "image_mismatch", ("image 0", "with 12 tokens", "length 1")),
    "both": (with_content_parts, "invalid_request", ("content_parts: expected none with features",)),
    "without-images": (lambda body: body.update(features=None), "image_mismatch", ("0 images", "got 47")),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_features_are_refused(qwen: Vision, case: str):
    change, code, parts = BAD[case]
    good = rendered(qwen, "a ", WIDE, " b ", LARGE, max_tokens=2, temperature=0)
    body = copy.deepcopy(good)
    change(body)
    answer = qwen.server.post(GENERATE, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    for part in parts:
        assert part in error["message"], error
    assert len(error["message"]) < 700
    assert len(generated(qwen, good)["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize(
    "parts, code, words",
    [
        ([{"type": "image_url", "url": "https://example.com/a.png"}], "invalid_image", ("content_parts[0]", "got a URL")),
        ([{"type": "image_url", "url": None}], "invalid_request", ("content_parts[0].url",)),
        ([{"type": "audio_url", "url": "data:,"}], "invalid_request", ("content_parts[0].type", "audio_url")),
        ([], "image_mismatch", ("0 images", "got 1")),
        ([{"type": "image_url", "url": PNG}] * 2, "image_mismatch", ("2 images", "got 1")),
        ([{"type": "image_url", "url": PNG}] * 7, "image_mismatch", ("at most 6", "got 7")),
    ],
)  # fmt: skip
def test_bad_content_parts_are_refused(qwen: Vision, parts, code, words):
    body = {"token_ids": qwen.ids("a @"), "content_parts": parts, "sampling_params": GREEDY}
    answer = qwen.server.post(GENERATE, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    for word in words:
        assert word in error["message"], error


def test_a_render_refuses_what_the_chat_refuses(qwen: Vision):
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [url]}]},
        {"messages": [{"role": "user", "content": "<|image_pad|>"}]},
        {"messages": conversation(*[SMALL] * 7)},
        {"messages": conversation(*[picture(600, 600, n) for n in range(3)])},
        {"messages": conversation("a"), "chat_template": "x"},
        {"messages": conversation("a"), "chat_template_kwargs": {"tokenize": True}},
        {"messages": conversation("a"), "mm_processor_kwargs": {"patch_size": 1}},
    ]
    for body in bodies:
        chat, render = (qwen.server.post(path, body) for path in ("/v1/chat/completions", RENDER))
        assert chat.status_code == 400
        errors = [answer.json()["error"] for answer in (chat, render)]
        assert errors[0].pop("request_id") != errors[1].pop("request_id")
        assert (render.status_code, errors[1]) == (400, errors[0])
