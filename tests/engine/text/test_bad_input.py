"""Bad input is refused before it reaches the engine; the error gives its location and a remedy."""

import time

import pytest
import requests

from harness.hostile_requests import nested
from harness.images import encoded, picture
from harness.servers import Server

VOCAB, MAX_LEN = 2048, 512
OK = [[1, 2, 3]]


def kwargs(**options):
    return {"prompts": OK, "generation_kwargs": options}


GRAMMAR = {"regex": "[a-z]{3}"}
CASES = {
    # name of the case: (body, texts that the message must contain, …)
    "no-token-left": (
        kwargs(structured_outputs=GRAMMAR, allowed_token_ids=[5], max_tokens=4),
        "allowed_token_ids",
        "structured_outputs",
    ),
    "bool-id": ({"prompts": [[1], [1, True]]}, "prompts[1][1]", "got `bool`"),
    "float-id": ({"prompts": [[1.0]]}, "prompts[0][0]", "got `float`"),
    "string-id": ({"prompts": [["1"]]}, "prompts[0][0]", "got `str`"),
    "null-id": ({"prompts": [[None]]}, "prompts[0][0]", "got `null`"),
    "negative-id": ({"prompts": [[1, -1]]}, "prompts[0][1]", f"[0, {VOCAB})", "-1"),
    "id-of-vocabulary-size": ({"prompts": [OK[0], [VOCAB]]}, "prompts[1][0]", str(VOCAB)),
    "id-of-70-bits": ({"prompts": [[2**70]]}, "prompts[0][0]", str(2**70)),
    "empty-prompt": ({"prompts": [[1], []]}, "prompts[1]", "empty"),
    "empty-text": ({"prompts": [""]}, "prompts[0]", "empty"),
    "no-prompts": ({"prompts": []}, "prompts", "empty list"),
    "prompts-missing": ({}, "prompts"),
    "prompts-no-list": ({"prompts": "a"}, "prompts", "got `str`"),
    "nested-too-deep": ({"prompts": [[[1]]]}, "prompts[0][0]"),
    "mixed-kinds": ({"prompts": ["a", [1]]}, "prompts[1]", "text", "token ids"),
    "mixed-objects": ({"prompts": [[1], {"prompt_token_ids": [1]}]}, "prompts[1]"),
    "too-long": ({"prompts": [[1], [1] * MAX_LEN]}, "prompts[1]", str(MAX_LEN - 1), str(MAX_LEN)),
    "unknown-field": ({"prompts": OK, "max_token": 3}, "max_token"),
    "unknown-in-object": ({"prompts": [{"prompt_token_ids": [1], "x": 1}]}, "prompts[0]", "x"),
    "cache-salt-number": ({"prompts": [{"prompt_token_ids": [1], "cache_salt": 1}]}, "cache_salt"),
    "cache-salt-empty": ({"prompts": [{"prompt_token_ids": [1], "cache_salt": ""}]}, "cache_salt"),
    "temperature-3": ({"prompts": OK, "temperature": 3}, "temperature", "2"),
    "temperature-negative": ({"prompts": OK, "temperature": -0.1}, "temperature"),
    "temperature-text": ({"prompts": OK, "temperature": "1"}, "temperature", "got `str`"),
    "top-p-0": ({"prompts": OK, "top_p": 0}, "top_p"),
    "top-k--2": ({"prompts": OK, "top_k": -2}, "top_k"),
    "min-p-2": ({"prompts": OK, "min_p": 2}, "min_p"),
    "repetition-penalty-0": ({"prompts": OK, "repetition_penalty": 0}, "repetition_penalty"),
    "max-tokens-0": ({"prompts": OK, "max_tokens": 0}, "max_tokens"),
    "max-tokens-float": ({"prompts": OK, "max_tokens": 3.5}, "max_tokens", "got `float`"),
    "n-0": ({"prompts": OK, "n": 0}, "n:"),
    "n-true": ({"prompts": OK, "n": True}, "n:", "got `bool`"),
    "n-huge": ({"prompts": OK, "n": 10**9}, "n = 1000000000"),
    "n-greedy": ({"prompts": OK, "n": 2, "temperature": 0}, "n:", "temperature"),
    "logprobs-129": ({"prompts": OK, "logprobs": 129}, "logprobs", "at most 128", "--max-logprobs"),
    "logprobs--2": ({"prompts": OK, "logprobs": -2}, "logprobs"),
    "logprobs-all": ({"prompts": OK, "logprobs": -1}, "logprobs"),
    "truncate-0": ({"prompts": OK, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "regex-broken": ({"prompts": OK, "structured_outputs_regex": "("}, "regex"),
    "kwargs-list": ({"prompts": OK, "generation_kwargs": []}, "generation_kwargs"),
    "kwargs-unknown": (kwargs(temprature=1), "temprature"),
    "kwargs-private": (kwargs(_all_stop_token_ids=[1]), "_all_stop_token_ids"),
    "kwargs-of-the-server": (kwargs(output_kind=1), "output_kind", "the server sets it"),
    "kwargs-not-returned": (kwargs(prompt_logprobs=1), "prompt_logprobs"),
    "seed-float": (kwargs(seed=1.5), "seed", "got `float`"),
    "seed-text": (kwargs(seed="x"), "seed"),
    "seed-65-bits": (kwargs(seed=2**64), "seed"),
    "stop-empty": (kwargs(stop=[""]), "stop"),
    "stop-token-outside": (kwargs(stop_token_ids=[VOCAB], min_tokens=1), "stop_token_ids[0]"),
    "allowed-outside": (kwargs(allowed_token_ids=[-1]), "allowed_token_ids[0]"),
    "allowed-empty": (kwargs(allowed_token_ids=[]), "allowed_token_ids"),
    "bias-outside": (kwargs(logit_bias={str(VOCAB): 1}), "logit_bias"),
    "bias-no-id": (kwargs(logit_bias={"a": 1}), "logit_bias"),
    "min-over-max": (kwargs(min_tokens=17), "min_tokens", "16"),
    "patterns-reversed": (
        kwargs(repetition_detection={"max_pattern_size": 1, "min_pattern_size": 3, "min_count": 2}),
        "repetition_detection",
        "at most max_pattern_size (1), got 3",
    ),
    "pattern-once": (
        kwargs(repetition_detection={"max_pattern_size": 1, "min_count": 1}),
        "at least 2, got 1",
    ),
    "bad-words-empty": (kwargs(bad_words=[""]), "bad_words"),
    "presence-3": (kwargs(presence_penalty=3), "presence_penalty"),
    "seed-and-n-over-64-bits": (
        {"prompts": OK, "n": 2, "generation_kwargs": {"seed": 2**63 - 1}},
        "seed",
        "2**63",
    ),
    "min-tokens-over-the-context": (
        kwargs(max_tokens=None, min_tokens=2**31 - 1),
        "min_tokens",
        str(MAX_LEN),
    ),
    "allowed-1025": (kwargs(allowed_token_ids=list(range(1025))), "allowed_token_ids"),
    "bias-513": (kwargs(logit_bias={str(i): 1 for i in range(513)}), "logit_bias"),
    "stop-tokens-97": (kwargs(stop_token_ids=list(range(97)), min_tokens=1), "stop_token_ids"),
    "bad-words-33": (kwargs(bad_words=["a"] * 33), "bad_words"),
    "bad-words-long": (kwargs(bad_words=["word" * 200]), "bad_words", "512"),
    "extra-args-huge": (kwargs(extra_args={"a": 2**70}), "64 bits"),
    "extra-args-deep": (kwargs(extra_args=nested(300)), "extra_args", "64 levels"),
    "structured-json-object-false": (
        kwargs(structured_outputs={"json_object": False}),
        "json_object",
    ),
    "structured-nul": (kwargs(structured_outputs={"regex": "a\0"}), "NUL"),
    "structured-empty": (kwargs(structured_outputs={"grammar": ""}), "structured_outputs"),
    "structured-deep": (
        kwargs(structured_outputs={"json": '{"a":' * 70 + "1" + "}" * 70}),
        "64 levels",
    ),
    "structured-two": (kwargs(structured_outputs={"regex": "a", "choice": ["b"]}), "exactly one"),
    "structured-none": (kwargs(structured_outputs={}), "exactly one"),
    "structured-unknown": (kwargs(structured_outputs={"regexp": "a"}), "regexp"),
    "structured-json-broken": (kwargs(structured_outputs={"json": "{"}), "prompts[0]"),
    "structured-grammar-broken": (kwargs(structured_outputs={"grammar": "root ::="}), "prompts[0]"),
}


def assert_serves(server: Server) -> None:
    assert len(server.generate(OK, max_tokens=2)["completion_ids"]) == 1


@pytest.mark.parametrize("case", CASES)
def test_a_bad_field_is_refused(server: Server, case: str):
    body, *fragments = CASES[case]
    answer = server.post("/generate/", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == ("prompt_too_long" if case == "too-long" else "invalid_request")
    for fragment in fragments:
        assert fragment in error["message"], error["message"]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"nonsense", b'"text"', b"\xff\xfe", b'{"prompts": [[NaN]]}', b"[" * 100_000],
    ids=["empty", "cut", "no-json", "no-object", "no-utf8", "nan", "very-deep"],
)
def test_a_body_that_is_not_a_json_object_is_refused(server: Server, data: bytes):
    answer = requests.post(server.url + "/generate/", data=data, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"


def test_one_bad_prompt_fails_the_request_before_the_engine(server: Server):
    prompts = [[index + 1] for index in range(64)]
    prompts[40] = [1, VOCAB + 5]
    time.sleep(1)
    before = server.metrics("prompt_tokens_total")
    answer = server.post("/generate/", {"prompts": prompts})
    assert answer.status_code == 400
    assert "prompts[40][1]" in answer.json()["error"]["message"]
    # Longer than two heartbeats.
    time.sleep(1)
    assert server.metrics("prompt_tokens_total") == before


def test_the_server_still_serves_after_all_bad_requests(server: Server):
    for body, *_ in CASES.values():
        server.post("/generate/", body)
    assert_serves(server)
    assert server.get("/ready").json()["num_ready"] == 2


def test_a_text_model_refuses_images(server: Server):
    answer = server.post("/generate/", {"prompts": OK, "images": [encoded(picture(8, 8))]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "image_mismatch")
    assert "images[0]: expected no images" in error["message"]
    assert server.generate(OK, images=[None], max_tokens=1)["prompt_ids"] == OK
