"""Images that are refused before the model runs; errors say what was expected and what came."""

import base64
from functools import cache

import pytest

from harness.images import encoded, file_of, picture, with_size
from tests.engine.images.conftest import GREEDY, Vision

SMALL, WIDE, LARGE = picture(56, 56, 1), picture(168, 56, 2), picture(200, 140, 3)


def test_placeholder_mismatches_are_refused_with_both_numbers(model: Vision):
    small, wide = encoded(SMALL), encoded(WIDE)
    one, two = model.ids("a @ b"), model.ids("a @ b @")
    expanded = model.see("a @ b", [SMALL]).prompt_ids
    swapped = model.see("@ @", [WIDE, SMALL]).prompt_ids
    # One placeholder more than the only image has: not one expanded and one single placeholder.
    last = (
        len(expanded)
        - 1
        - expanded[::-1].index(model.ids(model.placeholder)[len(model.ids("@")) // 2])
    )
    grown = [expanded[: last + 1] + expanded[last:]]
    cases = {
        "no-placeholder": ([model.ids("a b")], [[small]], "1 images", "got 0"),
        "no-image": ([one], None, "0 images", "got 1"),
        "null-image": ([one], [None], "0 images", "got 1"),
        "empty-list": ([one], [[]], "0 images", "got 1"),
        "too-few": ([two], [[small]], "1 images", "got 2"),
        "too-many": ([one], [[small, wide]], "2 images", "got 1"),
        "too-few-expanded": ([swapped], [[wide]], "1 images", "in runs of"),
        "too-many-expanded": ([expanded], [[small, wide]], "2 images", "in runs of"),
        "other-size": ([expanded], [[wide]], "as their sizes need", "in runs of"),
        "other-order": ([swapped], [[small, wide]], "as their sizes need", "in runs of"),
        "of-two-forms": (grown, [[small, wide]], "2 images", "in runs of"),
        "cut-off": ([swapped[:-3]], [[wide, small]], "as their sizes need", "in runs of"),
        "over-the-limit": ([model.ids("@" * 7)], [[small] * 7], "at most 6", "got 7"),
        "other-length": ([one, one], [[small]], "2 prompts", "got 1"),
    }
    for name, (prompts, images, *parts) in cases.items():
        answer = model.server.post("/generate/", {"prompts": prompts, "images": images})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "image_mismatch"), (name, error)
        for part in parts:
            assert part in error["message"], (name, error)
    good = model.server.generate([one], images=[small], **GREEDY)
    assert good["prompt_ids"] == [expanded]


@cache
def bad_images() -> dict[str, tuple[str, str]]:
    whole, photo = file_of(LARGE), file_of(LARGE, "JPEG")
    as_text = lambda data: base64.b64encode(data).decode()  # noqa: E731
    return {
        "no-base64": ("not base64!", "in base64"),
        "url": ("https://example.com/a.png", "got a URL"),
        "file-url": ("file:///etc/passwd", "got a URL"),
        "empty": ("", "0 bytes"),
        "no-image": (as_text(b"hello, this is text"), "that are not an image"),
        "svg": (as_text(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "that are not an image"),
        "truncated-png": (as_text(whole[: len(whole) // 2]), "that are not an image"),
        "truncated-jpeg": (as_text(photo[: len(photo) // 2]), "cannot be decoded"),
        "damaged-png": (as_text(whole[:200] + b"\0\0\0\0" + whole[204:]), "that are not an image"),
        "bomb": (as_text(with_size(whole, 30_000, 30_000)), "30000 x 30000"),
        "no-size": (as_text(with_size(whole, 0, 0)), "that are not an image"),
        "drawn-out": (as_text(file_of(picture(4, 1000))), "4 x 1000"),
    }


@pytest.mark.parametrize("name", bad_images())
def test_a_bad_image_is_refused_with_its_location(qwen: Vision, name: str):
    text, part = bad_images()[name]
    ids, good = qwen.ids("a @ @"), encoded(SMALL)
    body = {"prompts": [ids, ids], "images": [[good, good], [text, good]]}
    answer = qwen.server.post("/generate/", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_image"), error
    assert error["param"] == "images"
    assert part in error["message"]
    # The first is found by the front end, the second by the worker.
    assert error["message"].startswith(("images[1][0]: ", "prompts[1]: image 0: "))
    assert len(error["message"]) < 700
    assert qwen.server.generate([ids], images=[[good, good]], max_tokens=1)["completion_ids"]


@pytest.mark.parametrize(
    "body, parts",
    [
        ({"mm_processor_kwargs": {"patch_size": 16}}, ("patch_size", "min_pixels, max_pixels")),
        ({"mm_processor_kwargs": {"max_pixels": 10**12}}, ("max_pixels", "max_image_pixels")),
        ({"mm_processor_kwargs": {"max_pixels": "9"}}, ("max_pixels", "whole numbers")),
        ({"mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 8}}, ("9 and 8",)),
        ({"mm_processor_kwargs": [None, None]}, ("1 prompts", "got 2")),
        ({"mm_processor_kwargs": 3}, ("mm_processor_kwargs", "got `int`")),
        # One pixel each, enlarged by the processor: together they exceed max_image_pixels.
        (
            {
                "images": [[encoded(picture(1, 1))] * 5],
                "mm_processor_kwargs": {"min_pixels": 2**23},
            },
            ("images[0][4]", "max_image_pixels", str(5 * 2**23)),
        ),
        ({"images": [3]}, ("images[0]", "got `int`")),
        ({"images": [[None]]}, ("images[0][0]", "got `null`")),
        ({"images": "a"}, ("images", "got `str`")),
        ({"truncate_prompt_tokens": 5}, ("truncate_prompt_tokens", "images")),
        ({"prompts": [{"prompt_token_ids": [1], "multi_modal_data": {"video": []}}]}, ("video",)),
        (
            {"prompts": [{"prompt_token_ids": [1], "multi_modal_data": {"image": "aGk="}}]},
            ("images[0]", "multi_modal_data"),
        ),
    ],
)
def test_bad_fields_are_refused(qwen: Vision, body, parts):
    whole = {"prompts": [qwen.ids("a @")], "images": [encoded(SMALL)], **body}
    answer = qwen.server.post("/generate/", whole)
    assert answer.status_code == 400, answer.text
    for part in parts:
        assert part in answer.json()["error"]["message"]


def test_a_prompt_too_long_with_its_images_is_refused(qwen: Vision):
    body = {
        "prompts": [qwen.ids("@ @ @")],
        "images": [[encoded(picture(600, 600, n)) for n in range(3)]],
    }
    answer = qwen.server.post("/generate/", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "prompt_too_long")
    assert "1023" in error["message"]
