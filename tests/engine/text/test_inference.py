"""`POST /inference/v1/generate` over real vLLM, compared with /generate/ and transformers."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.servers import Server
from tests.kit.models import reference
from tests.kit.models.reference import PROMPT, TOLERANCE
from tests.kit.peers.vllm_protocol import GENERATE, read_by_vllm

MAX_LEN = 1024
# Shorter than a block of the prefix cache, so that /generate/ finds nothing there.
IDS = PROMPT


def answer_of(server: Server, ids: list[int], options: dict[str, Any], **fields: Any) -> Any:
    """The response, which vLLM's model has validated."""
    answer = server.post(GENERATE, {"token_ids": ids, "sampling_params": options, **fields})
    assert answer.status_code == 200, answer.text
    read_by_vllm("GenerateResponse", answer.content)
    return answer.json()


def events_of(server: Server, ids: list[int], options: dict[str, Any], **fields: Any) -> Any:
    """The events of a stream, which vLLM's model has validated where it has one."""
    body = {"token_ids": ids, "sampling_params": options, "stream": True, **fields}
    answer = server.post(GENERATE, body)
    assert answer.status_code == 200, answer.text
    *events, done = [one.removeprefix("data: ") for one in answer.text.strip().split("\n\n")]
    assert done == "[DONE]"
    for event in events:
        read_by_vllm("GenerateStreamResponse", event.encode())
    return [json.loads(one) for one in events]


def values_of(choice: dict[str, Any]) -> list[float]:
    return [one["logprob"] for one in choice["logprobs"]["content"]]


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"seed": 11}, {"seed": 11, "n": 3}, {"seed": 2, "n": 2, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.2}],
    ids=["greedy", "seeded", "n", "options"],
)  # fmt: skip
def test_ids_and_logprobs_equal_those_of_generate(single_server: Server, options):
    options = {"max_tokens": 16, "logprobs": 2, **options}
    for ids in ([5], IDS, list(range(100, 300))):
        kwargs = {"seed": options["seed"]} if "seed" in options else {}
        named = {name: one for name, one in options.items() if name != "seed"}
        expected = single_server.generate([ids], **named, generation_kwargs=kwargs)
        found = answer_of(single_server, ids, options, return_token_ids=True)
        assert found["prompt_token_ids"] == expected["prompt_ids"][0] == ids
        choices = found["choices"]
        assert [one["index"] for one in choices] == list(range(options.get("n", 1)))
        assert [one["token_ids"] for one in choices] == expected["completion_ids"]
        assert [one["finish_reason"] for one in choices] == expected["finish_reasons"]
        rows = zip(expected["logprobs"], expected["logprob_token_ids"], strict=True)
        for choice, (values, entries) in zip(choices, rows, strict=True):
            content = choice["logprobs"]["content"]
            best = [[one["token_id"] for one in entry["top_logprobs"]] for entry in content]
            assert best == [one[:2] for one in entries]
            for entry, at, row in zip(content, entries, values, strict=True):
                # Batches of different shapes differ in a float32's last bits.
                expected_value = row[at.index(entry["token_id"])]
                assert entry["logprob"] == pytest.approx(expected_value, abs=1e-5)
                assert [one["rank"] for one in entry["top_logprobs"]] == [1, 2]
                shown = [entry, *entry["top_logprobs"]]
                assert all(one["token"] == f"token_id:{one['token_id']}" for one in shown)
        assert found["usage"]["completion_tokens"] == sum(map(len, expected["completion_ids"]))


def test_greedy_ids_and_logprobs_equal_transformers(single_server: Server, tiny_model: str):
    options = {"temperature": 0, "max_tokens": 24, "logprobs": 0, "ignore_eos": True}
    (choice,) = answer_of(single_server, IDS, options)["choices"]
    assert choice["token_ids"] == reference.greedy(tiny_model, IDS, 24)
    rows = reference.logprobs(tiny_model, IDS, choice["token_ids"])
    expected = rows[range(24), choice["token_ids"]].tolist()
    assert values_of(choice) == pytest.approx(expected, abs=TOLERANCE)
    assert {one["rank"] for one in choice["logprobs"]["content"]} == {1}


def test_200_requests_at_once_have_the_answers_to_their_own_prompts(
    server: Server, tiny_model: str
):
    """In the order in which they were sent, at two front ends and two workers."""
    prompts = [[index + 10, 7, index + 10] for index in range(200)]
    options = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    with ThreadPoolExecutor(100) as threads:
        answers = list(
            threads.map(
                lambda ids: answer_of(
                    server, ids, options, request_id=f"order-{ids[0]}", return_token_ids=True
                ),
                prompts,
            )
        )
    assert [one["prompt_token_ids"] for one in answers] == prompts
    assert [one["request_id"] for one in answers] == [f"order-{ids[0]}" for ids in prompts]
    # The same ids as those of one request with all prompts.
    batch = server.generate(
        prompts, temperature=0, max_tokens=4, generation_kwargs={"ignore_eos": True}
    )
    assert [one["choices"][0]["token_ids"] for one in answers] == batch["completion_ids"]
    for index in (0, 57, 121, 199):
        expected = reference.greedy(tiny_model, prompts[index], 4)
        assert answers[index]["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("options", [{"logprobs": 0}, {"logprobs": 2}, {"logprob_token_ids": [7]}])
def test_a_sampled_token_has_its_rank_in_the_vocabulary(
    single_server: Server, tiny_model: str, options
):
    options = {"seed": 3, "max_tokens": 12, "ignore_eos": True, **options}
    (choice,) = answer_of(single_server, IDS, options)["choices"]
    found = [one["rank"] for one in choice["logprobs"]["content"]]
    rows = reference.logprobs(tiny_model, IDS, choice["token_ids"])
    for row, token_id, rank in zip(rows, choice["token_ids"], found, strict=True):
        # Tokens that are equal but for rounding may come in either order.
        own = row[token_id]
        assert (row > own + TOLERANCE).sum() < rank <= (row > own - TOLERANCE).sum()
    assert max(found) > 3


def test_chosen_ids_have_log_probabilities(single_server: Server, tiny_model: str):
    options = {"max_tokens": 4, "logprob_token_ids": [7, 9], "ignore_eos": True}
    (choice,) = answer_of(single_server, IDS, options)["choices"]
    rows = reference.logprobs(tiny_model, IDS, choice["token_ids"])
    for row, entry in zip(rows, choice["logprobs"]["content"], strict=True):
        found = {one["token_id"]: one["logprob"] for one in entry["top_logprobs"]}
        assert found.keys() == {7, 9, entry["token_id"]}
        expected = {one: row[one].item() for one in found}
        assert found == pytest.approx(expected, abs=TOLERANCE)


def test_a_stream_equals_the_whole_answer(single_server: Server):
    options = {"n": 3, "seed": 5, "max_tokens": 20, "logprobs": 1}
    fields = {"return_token_ids": True}
    whole = answer_of(single_server, IDS, options, **fields)
    *events, last = events_of(
        single_server, IDS, options, stream_options={"include_usage": True}, **fields
    )
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert [one.get("prompt_token_ids") for one in events[:2]] == [IDS, None]
    assert len(events) > 20
    joined: dict[int, dict[str, Any]] = {}
    for event in events:
        assert event["usage"] is None
        for choice in event["choices"]:
            one = joined.setdefault(choice["index"], {"token_ids": [], "content": []})
            assert one.get("finish_reason") is None, "a choice went on after its end"
            one["token_ids"] += choice["token_ids"]
            one["content"] += choice["logprobs"]["content"]
            one |= {key: choice[key] for key in ("finish_reason", "stop_reason", "weight_versions")}
    for choice in whole["choices"]:
        one = joined[choice["index"]]
        content = one.pop("content")
        for part, expected in zip(content, choice["logprobs"]["content"], strict=True):
            assert part["token_id"] == expected["token_id"]
            assert part["logprob"] == pytest.approx(expected["logprob"], abs=1e-5)
        assert one == {key: choice[key] for key in one}
        (span,) = one["weight_versions"]
        assert (span["start"], span["end"]) == (0, len(one["token_ids"]))


def test_prompt_logprobs_begin_with_the_prompt_s_own_token(single_server: Server, tiny_model: str):
    options = {"max_tokens": 1, "prompt_logprobs": 2}
    found = answer_of(single_server, IDS, options)["prompt_logprobs"]
    rows = reference.logprobs(tiny_model, IDS[:1], IDS[1:])
    assert found[0] is None
    for row, token_id, entries in zip(rows, IDS[1:], found[1:], strict=True):
        key, own = next(iter(entries.items()))
        assert key == str(token_id)
        assert own["logprob"] == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert own["rank"] == 1 + (row > row[token_id]).sum().item()
        assert own["decoded_token"] is None
        assert 2 <= len(entries) <= 3


def test_cache_salts_separate_prefixes(single_server: Server):
    ids = list(range(700, 900))

    def num_cached(salt: str | None) -> int:
        answer = answer_of(single_server, ids, {"max_tokens": 1}, cache_salt=salt)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [num_cached("step-1"), num_cached("step-2"), num_cached(None)] == [0, 0, 0]
    assert min(num_cached("step-1"), num_cached("step-2"), num_cached(None)) > 0


def test_without_a_limit_a_completion_fills_the_context(single_server: Server):
    ids = [5] * (MAX_LEN - 40)
    (choice,) = answer_of(single_server, ids, {"ignore_eos": True})["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (40, "length")
    assert choice["logprobs"] is None


def test_stops_by_token_and_by_text(single_server: Server, tiny_model: str):
    ids = reference.greedy(tiny_model, IDS, 8)
    text = single_server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    for options, reason in (
        ({"stop_token_ids": [ids[3]]}, ids[3]),
        ({"stop": [text[3:5]]}, text[3:5]),
    ):
        options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **options}
        (choice,) = answer_of(single_server, IDS, options)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
        num = len(choice["token_ids"])
        assert choice["token_ids"] == ids[:num]
        if reason == ids[3]:
            assert num == 1 + ids.index(ids[3])


@pytest.mark.parametrize(
    "options, part",
    [
        ({"structured_outputs": {"grammar": "root ::="}}, "token_ids: "),
        ({"allowed_token_ids": [2048]}, "allowed_token_ids[0]"),
        ({"logprobs": 129}, "logprobs: expected at most 128"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
    ],
)
def test_bad_options_are_refused_and_the_server_serves_on(single_server: Server, options, part):
    answer = single_server.post(GENERATE, {"token_ids": IDS, "sampling_params": options})
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]
    assert len(answer_of(single_server, IDS, {"max_tokens": 2})["choices"]) == 1
