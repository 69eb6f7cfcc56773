"""Images with token ids, expanded exactly once: two model families in real vLLM."""

import base64
import concurrent.futures
import http.client
import json
import re
import subprocess
import sys
import time
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from transformers.image_utils import load_image

from harness.images import encoded, file_of, picture
from harness.servers import REPOSITORY, environment, wait_until
from tests.engine.images.conftest import GREEDY, NUM_TOKENS, TOLERANCE, Vision

SMALL, WIDE, LARGE = picture(56, 56, 1), picture(168, 56, 2), picture(200, 140, 3)
PROMPTS = {
    "one": ("What is @?", [SMALL]),
    "two-sizes": ("Compare @ with @ now", [WIDE, LARGE]),
    "adjacent": ("@@@", [SMALL, WIDE, SMALL]),
    "conversation": (
        "<|im_start|>user\n@ hello<|im_end|>\n<|im_start|>assistant\na cat<|im_end|>\n"
        "<|im_start|>user\nand @@?<|im_end|>\n<|im_start|>assistant\n",
        [LARGE, SMALL, WIDE],
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_every_input_form_agrees_with_transformers(model: Vision, name: str):
    text, images = PROMPTS[name]
    expected = model.see(text, images)
    files = [encoded(image) for image in images]
    single = model.ids(text)
    assert len(single) < len(expected.prompt_ids)
    as_object = {"prompt_token_ids": single, "multi_modal_data": {"image": files}}
    forms = {
        "text": {"prompts": [model.text(text)], "images": [files]},
        "single": {"prompts": [single], "images": [files]},
        "expanded": {"prompts": [expected.prompt_ids], "images": [files]},
        "object": {"prompts": [as_object]},
        "expanded-object": {"prompts": [{**as_object, "prompt_token_ids": expected.prompt_ids}]},
    }
    for form, body in forms.items():
        answer = model.server.generate(**body, **GREEDY)
        assert answer["prompt_ids"] == [expected.prompt_ids], form
        assert answer["completion_ids"] == [expected.completion_ids], form
        logprobs = [entries[0] for entries in answer["logprobs"][0]]
        assert logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE), form


def test_a_turn_may_add_an_unexpanded_image_to_expanded_ones(model: Vision):
    # As when an environment appends to the ids it received.
    first = model.see("look at @", [LARGE])
    assert model.ids("look at @")[: len(model.ids("look at "))] == model.ids("look at ")
    added = model.ids(" and @?")
    expected = model.see("look at @ and @?", [LARGE, SMALL])
    answer = model.server.generate(
        [first.prompt_ids + added], images=[[encoded(LARGE), encoded(SMALL)]], **GREEDY
    )
    assert answer["prompt_ids"] == [expected.prompt_ids]
    assert answer["completion_ids"] == [expected.completion_ids]


def test_prompts_with_and_without_images_in_one_request(model: Vision):
    cases = [("a @ b", [SMALL]), ("no image", []), ("@", [WIDE]), ("x @ y @", [SMALL, LARGE])]
    images = [[encoded(SMALL)], None, encoded(WIDE), [encoded(SMALL), encoded(LARGE)]]
    answer = model.server.generate([model.ids(text) for text, _ in cases], images=images, **GREEDY)
    for index, (text, pictures) in enumerate(cases):
        expected = model.see(text, pictures)
        assert answer["prompt_ids"][index] == expected.prompt_ids
        assert answer["completion_ids"][index] == expected.completion_ids


def test_processor_arguments_may_be_shared_or_per_prompt(qwen: Vision):
    text, file = "a @", encoded(LARGE)
    few = {"max_pixels": 28 * 28 * 8}
    many = {"min_pixels": 28 * 28 * 60, "max_pixels": 28 * 28 * 90}
    ids = qwen.ids(text)
    # transformers' newer name for the two.
    sizes = [
        {"shortest_edge": kwargs.get("min_pixels", 28 * 28), "longest_edge": kwargs["max_pixels"]}
        for kwargs in (few, many)
    ]
    expected = [qwen.see(text, [LARGE], images_kwargs={"size": size}).prompt_ids for size in sizes]
    default = qwen.see(text, [LARGE]).prompt_ids
    assert len(expected[0]) < len(default) < len(expected[1])
    generate = qwen.server.generate
    images = [file, file, file]
    answer = generate([ids] * 3, images=images, mm_processor_kwargs=few)
    assert answer["prompt_ids"] == [expected[0]] * 3
    answer = generate([ids] * 3, images=images, mm_processor_kwargs=[few, None, many])
    assert answer["prompt_ids"] == [expected[0], default, expected[1]]
    own = {"prompt_token_ids": ids, "multi_modal_data": {"image": file}}
    answer = generate([{**own, "mm_processor_kwargs": few}, own], mm_processor_kwargs=many)
    assert answer["prompt_ids"] == expected
    # Expanded with other arguments than those in the request.
    refused = qwen.server.post("/generate/", {"prompts": [expected[0]], "images": [file]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "image_mismatch")


@cache
def odd_images() -> dict[str, bytes]:
    rng = picture(80, 60, 5)
    alpha = rng.convert("RGBA")
    alpha.putalpha(rng.convert("L"))
    transparent_palette = rng.quantize(16)
    transparent_palette.info["transparency"] = 3
    frames = [picture(60, 60, seed).quantize(16) for seed in (6, 7, 8)]
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    values = np.random.default_rng(9).integers(0, 65_536, (60, 60), dtype=np.uint16)
    sixteen = PIL.Image.fromarray(values)
    assert sixteen.mode == "I;16"
    return {
        "jpeg": file_of(rng, "JPEG"),
        "webp": file_of(rng, "WEBP"),
        "bmp": file_of(rng, "BMP"),
        "tiff": file_of(rng, "TIFF"),
        "palette": file_of(rng.quantize(16)),
        "palette-with-transparency": file_of(transparent_palette, transparency=3),
        "transparency": file_of(alpha),
        "grey": file_of(rng.convert("L")),
        "grey-with-transparency": file_of(rng.convert("LA")),
        "one-bit": file_of(rng.convert("1")),
        "cmyk": file_of(rng.convert("CMYK"), "JPEG"),
        "16-bit": file_of(sixteen),
        "animated": file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "turned": file_of(rng, "JPEG", exif=exif),
        "one-pixel": file_of(picture(1, 1)),
        "progressive": file_of(rng, "JPEG", progressive=True),
    }


@pytest.mark.parametrize("name", odd_images())
def test_odd_images_agree_with_transformers(qwen: Vision, name: str):
    data = odd_images()[name]
    expected = qwen.see("see @", [load_image(PIL.Image.open(BytesIO(data)))])
    file = base64.b64encode(data).decode()
    for text in (file, "data:image/png;base64," + file):
        answer = qwen.server.generate([qwen.ids("see @")], images=[text], **GREEDY)
        assert answer["prompt_ids"] == [expected.prompt_ids]
        assert answer["completion_ids"] == [expected.completion_ids]


def test_completions_of_a_prompt_share_its_images(qwen: Vision):
    images = lambda: qwen.server.metrics("images_total")["0"]  # noqa: E731
    # Longer than two heartbeats, so that the images of earlier tests are counted.
    time.sleep(1.2)
    before = images()
    answer = qwen.server.generate(
        [qwen.ids("@ and @")], images=[[encoded(SMALL), encoded(WIDE)]], n=5, max_tokens=4
    )
    assert len(answer["completion_ids"]) == 5
    assert len(answer["prompt_ids"]) == 1
    wait_until(lambda: images() > before, 20)
    assert images() - before == 2
    assert qwen.server.metrics("image_seconds_total")["0"] > 0


def test_the_prefix_cache_covers_images_and_never_mixes_two(qwen: Vision):
    # On a CPU vLLM caches blocks of 128 ids: at least one before the image, and one after it.
    before = "word " * 140
    text = before + "@ what" + " is it?" * 70
    ids = qwen.ids(text)
    first, second = picture(140, 140, 21), picture(140, 140, 22)
    num_before = len(qwen.ids(before))

    def ask(image: PIL.Image.Image, **fields):
        return qwen.server.generate([ids], images=[encoded(image)], **fields, **GREEDY)

    assert ask(first)["num_cached_tokens"] == [0]
    again = ask(first)
    assert again["num_cached_tokens"][0] > num_before + 25
    other = ask(second)
    assert 0 < other["num_cached_tokens"][0] <= num_before + 1
    # The same file with another size is a different image to the model.
    resized = ask(first, mm_processor_kwargs={"max_pixels": 28 * 28 * 10})
    assert resized["num_cached_tokens"][0] <= num_before + 1
    assert again["completion_ids"] == [qwen.see(text, [first]).completion_ids]
    assert other["completion_ids"] == [qwen.see(text, [second]).completion_ids]


def test_text_prompts_do_not_wait_for_images(qwen: Vision):
    large = encoded(picture(1200, 1000, 31), "JPEG")
    kwargs = {"max_pixels": 28 * 28 * 64}
    ids = qwen.ids("@")

    def ask_for_text() -> float:
        begin = time.monotonic()
        qwen.server.generate([[7, 8, 9]], max_tokens=1)
        return time.monotonic() - begin

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with_images = pool.submit(
            qwen.server.generate, [ids] * 60, images=[large] * 60,
            mm_processor_kwargs=kwargs, max_tokens=1,
        )  # fmt: skip
        begin = time.monotonic()
        latencies = []
        while not with_images.done():
            latencies.append(ask_for_text())
        images_s = time.monotonic() - begin
        assert len(with_images.result()["completion_ids"]) == 60
    print(f"60 images in {images_s:.1f} s; text meanwhile: {sorted(latencies)}")
    # Queued after the images, text prompts would have waited for all of them.
    assert len(latencies) > 3
    assert max(latencies) < images_s / 2


def test_images_in_messages_agree_with_transformers(qwen: Vision):
    texts = ["<|im_start|>user\n@ what?<|im_end|>\n<|im_start|>assistant\n",
             "<|im_start|>user\nno image<|im_end|>\n<|im_start|>assistant\n"]  # fmt: skip
    expected = [qwen.see(texts[0], [WIDE]), qwen.see(texts[1], [])]
    file = encoded(WIDE)
    parts = [
        {"type": "image_pil", "image_pil": file},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + file}},
        {"type": "image", "image": file},
    ]
    for part in parts:
        content = [part, {"type": "text", "text": " what?"}]
        messages = [
            [{"role": "user", "content": content}],
            [{"role": "user", "content": "no image"}],
        ]
        answer = qwen.server.post("/chat/", {"messages": messages, **GREEDY}).json()
        assert answer["prompt_ids"] == [one.prompt_ids for one in expected]
        assert answer["completion_ids"] == [one.completion_ids for one in expected]


@pytest.mark.parametrize("stream", [False, True])
def test_openai_s_routes_accept_images(qwen: Vision, stream: bool):
    text, images = PROMPTS["conversation"]
    expected = qwen.see(text, images)
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + encoded(image)}}
        for image in images
    ]
    text_part = {"type": "text", "text": " hello"}
    messages = [
        {"role": "user", "content": [parts[0], text_part]},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [{"type": "text", "text": "and "}, *parts[1:], {"type": "text", "text": "?"}]},
    ]  # fmt: skip
    body = {
        "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True,
        "return_token_ids": True, "stream": stream,
    }  # fmt: skip

    def asked(path: str, **fields) -> tuple[list[int], list[int]]:
        answer = qwen.server.post(path, body | fields)
        assert answer.status_code == 200, answer.text
        if not stream:
            whole = answer.json()
            return whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        first, *others = map(json.loads, events)
        return first["prompt_token_ids"], [
            i for one in others for i in one["choices"][0]["token_ids"]
        ]

    wanted = (expected.prompt_ids, expected.completion_ids)
    assert asked("/v1/chat/completions") == wanted
    for tokens in (qwen.ids(text), expected.prompt_ids):
        assert asked("/v1/chat/completions/tokens", tokens=tokens) == wanted
    fewer = qwen.server.post("/v1/chat/completions/tokens", body | {"tokens": qwen.ids("@")})
    assert (fewer.status_code, fewer.json()["error"]["code"]) == (400, "image_mismatch")


def test_items_of_a_response_may_have_images(qwen: Vision):
    text, images = PROMPTS["conversation"]
    expected = qwen.see(text, images)
    parts = [
        {"type": "input_image", "image_url": "data:image/png;base64," + encoded(one), "detail": "auto"}
        for one in images
    ]  # fmt: skip
    before, after = ({"type": "input_text", "text": one} for one in ("and ", "?"))
    items = [
        {"role": "user", "content": [parts[0], {"type": "input_text", "text": " hello"}]},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [before, *parts[1:], after]},
    ]
    body = {
        "input": items, "temperature": 0, "max_output_tokens": NUM_TOKENS, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    whole = qwen.server.post("/v1/responses", body).json()
    streamed = qwen.server.post("/v1/responses", body | {"stream": True}).text
    for found in (whole, json.loads(streamed.rpartition("data: ")[2])["response"]):
        assert found["prompt_token_ids"] == expected.prompt_ids
        assert found["token_ids"] == expected.completion_ids
        assert found["usage"]["input_tokens"] == len(expected.prompt_ids)
    broken = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    answer = qwen.server.post("/v1/responses", {"input": [{"role": "user", "content": [broken]}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_image", "input")
    assert error["message"].startswith("input: image")


def test_drift_ignores_image_placeholders(qwen: Vision):
    def drifted() -> list[float]:
        return [
            qwen.server.metrics(name)["0"]
            for name in ("compared_prompts_total", "drifted_prompts_total")
        ]

    # By then the metrics contain what earlier tests have counted.
    time.sleep(1)
    before = drifted()
    url = "data:image/png;base64," + encoded(SMALL)
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    single = qwen.server.post("/tokenize", {"messages": messages}).json()["tokens"]
    body = {"messages": messages, "tokens": single, "max_tokens": 1}
    expanded = qwen.server.post("/v1/chat/completions/tokens", body).json()["prompt_token_ids"]
    assert len(expanded) > len(single)
    # One conversation is compared at a time.
    wait_until(lambda: drifted() == [before[0] + 1, before[1]], 20, lambda: str(drifted()))
    assert qwen.server.post("/v1/chat/completions/tokens", body | {"tokens": expanded}).ok
    wait_until(lambda: drifted() == [before[0] + 2, before[1]], 20, lambda: str(drifted()))


def test_a_client_that_hangs_up_does_not_delay_the_next(qwen: Vision):
    image, ids = encoded(picture(900, 900, 41)), qwen.ids("@")
    kwargs = {"max_pixels": 50176}
    body = {
        "prompts": [ids] * 20, "images": [image] * 20, "mm_processor_kwargs": kwargs,
        "max_tokens": 900, "generation_kwargs": {"ignore_eos": True},
    }  # fmt: skip
    sequences = lambda: qwen.server.metrics("sequences")["0"]  # noqa: E731
    num_aborted = qwen.server.metrics("aborted_jobs_total")["0"]
    connection = http.client.HTTPConnection(qwen.server.url.removeprefix("http://"), timeout=30)
    connection.request("POST", "/generate/", json.dumps(body))
    wait_until(lambda: sequences() == 20, 20)
    connection.close()
    wait_until(lambda: sequences() == 0, 20)
    assert qwen.server.metrics("aborted_jobs_total")["0"] == num_aborted + 20
    answer = qwen.server.generate(
        [ids], images=[image], mm_processor_kwargs=kwargs, generation_kwargs={"ignore_eos": True}
    )
    assert answer["finish_reasons"] == ["length"]


@pytest.mark.parametrize("version", [pytest.param("0.29.1", marks=pytest.mark.variant), "1.9.2"])
def test_trl_client_sends_images(qwen: Vision, tmp_path: Path, version: str):
    from tests.kit.peers.trl_client import run_trl

    paths = []
    for index, image in enumerate((SMALL, WIDE, LARGE)):
        paths.append(str(tmp_path / f"{index}.png"))
        image.save(paths[-1])
    two, three = qwen.see("@ and @", [SMALL, WIDE]), qwen.see("describe @", [LARGE])
    plain = qwen.ids("no image")
    script = f"""
from PIL import Image
small, wide, large = map(Image.open, {paths})
two, three, plain = {two.prompt_ids}, {three.prompt_ids}, {plain}
options = dict(temperature=0.0, max_tokens=4, generation_kwargs={{"ignore_eos": True}})
answer({{
    "several": client.generate([two, three], images=[[small, wide], [large]], **options),
    "mixed": client.generate([two, plain, three], images=[[small, wide], None, [large]], **options),
}})
"""
    answers = run_trl(version, qwen.server.url, script)
    assert answers["several"]["prompt_ids"] == [two.prompt_ids, three.prompt_ids]
    assert answers["mixed"]["prompt_ids"] == [two.prompt_ids, plain, three.prompt_ids]
    for name, positions in {"several": (0, 1), "mixed": (0, 2)}.items():
        completions = answers[name]["completion_ids"]
        for position, expected in zip(positions, (two, three), strict=True):
            assert completions[position] == expected.completion_ids[:4]


def test_the_example_runs(qwen: Vision, tmp_path: Path):
    photo = tmp_path / "photo.png"
    LARGE.save(photo)
    result = subprocess.run(
        [sys.executable, "examples/generate_images.py", str(photo), qwen.server.url, qwen.folder],
        env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    with_image, without = re.findall(r"^(\d+) ids sent, (\d+) used: ", result.stdout, re.M)
    assert int(with_image[0]) < int(with_image[1])
    assert without[0] == without[1]
