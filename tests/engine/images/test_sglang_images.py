"""Images of SGLang's /generate: the prompt and the completion are transformers'."""

import pytest

from harness.images import encoded, picture
from tests.engine.images.conftest import NUM_TOKENS, TOLERANCE, Vision

SMALL, WIDE = picture(56, 56, 1), picture(168, 56, 2)
CASES = [("a @ b", [SMALL]), ("no image", []), ("@ x @", [WIDE, SMALL])]


def test_a_batch_with_images_agrees_with_transformers(qwen: Vision):
    files = [encoded(SMALL), None, [encoded(WIDE), encoded(SMALL)]]
    options = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    fields = {"image_data": files, "sampling_params": options, "return_prompt_token_ids": True, "return_logprob": True}  # fmt: skip
    for prompts in (
        {"text": [qwen.text(text) for text, _ in CASES]},
        {"input_ids": [qwen.ids(text) for text, _ in CASES]},
    ):
        answer = qwen.server.post("/generate", {**prompts, **fields})
        assert answer.status_code == 200, answer.text
        for found, (text, pictures) in zip(answer.json(), CASES, strict=True):
            expected = qwen.see(text, pictures)
            assert found["prompt_token_ids"] == expected.prompt_ids
            assert found["output_ids"] == expected.completion_ids
            meta = found["meta_info"]
            assert meta["prompt_tokens"] == len(expected.prompt_ids)
            values = [one[0] for one in meta["output_token_logprobs"]]
            assert values == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_an_image_in_a_batch_is_named_by_its_place(qwen: Vision):
    body = {"text": [qwen.text("@"), "a"], "image_data": [["%"], None]}
    answer = qwen.server.post("/generate", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("image_data[0][0]: ")


def test_the_start_of_the_prompt_s_log_probabilities_counts_the_image_s_tokens(qwen: Vision):
    fields = {
        "text": qwen.text("@"), "image_data": encoded(WIDE), "return_logprob": True,
        "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    expanded = qwen.see("@", [WIDE]).prompt_ids
    start = len(expanded) - 1
    assert start > len(qwen.ids("@"))
    answer = qwen.server.post("/generate", {**fields, "logprob_start_len": start})
    assert answer.status_code == 200, answer.text
    ((_, last, _),) = answer.json()["meta_info"]["input_token_logprobs"]
    assert last == expanded[-1]
    answer = qwen.server.post("/generate", {**fields, "logprob_start_len": len(expanded) + 1})
    assert answer.status_code == 400
    expected = f"logprob_start_len: expected at most {len(expanded)}, "
    assert answer.json()["error"]["message"].startswith(expected)
