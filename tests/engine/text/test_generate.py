"""/generate/ over real vLLM: two workers behind two gunicorn processes, tiny random model."""

import concurrent.futures
import re
import time

import pytest
import requests

from harness.servers import Server, wait_until
from tests.kit.models import reference
from tests.kit.models.reference import PROMPT, TOLERANCE


def flat(nested: list[list[float]]) -> list[float]:
    """Log-probabilities with one entry at each token."""
    assert all(len(entries) == 1 for entries in nested)
    return [entries[0] for entries in nested]


@pytest.mark.parametrize(
    "prompt", [PROMPT, [5], list(range(100, 400))], ids=["short", "one-token", "300-tokens"]
)
def test_greedy_ids_and_logprobs_equal_transformers(server: Server, tiny_model: str, prompt):
    answer = server.generate([prompt], temperature=0, max_tokens=24, logprobs=0,
                             generation_kwargs={"ignore_eos": True})  # fmt: skip
    assert answer["prompt_ids"] == [prompt]
    completion = answer["completion_ids"][0]
    assert completion == reference.greedy(tiny_model, prompt, 24)
    expected = reference.logprobs(tiny_model, prompt, completion)
    expected = expected[range(24), completion].tolist()
    assert flat(answer["logprobs"][0]) == pytest.approx(expected, abs=TOLERANCE)
    assert [ids[0] for ids in answer["logprob_token_ids"][0]] == completion


def test_logprobs_are_those_of_the_sampler(server: Server, tiny_model: str):
    options = {"temperature": 0.7, "repetition_penalty": 1.3}
    answer = server.generate([PROMPT], n=4, max_tokens=32, logprobs=0, **options)
    for completion, logprobs in zip(answer["completion_ids"], answer["logprobs"], strict=True):
        expected = reference.logprobs(tiny_model, PROMPT, completion, **options)
        expected = expected[range(len(completion)), completion].tolist()
        assert flat(logprobs) == pytest.approx(expected, abs=TOLERANCE)


def test_k_logprobs_are_the_best_and_the_sampled_one_in_descending_order(
    server: Server, tiny_model: str
):
    answer = server.generate([PROMPT], n=3, max_tokens=16, logprobs=5)
    for completion, logprobs, ids in zip(
        answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
    ):
        expected = reference.logprobs(tiny_model, PROMPT, completion)
        for position, sampled in enumerate(completion):
            row, entries = expected[position], ids[position]
            fifth_best = row.topk(5).values[-1].item()
            assert sampled in entries
            assert len(set(entries)) == len(entries) == 5 + (sampled not in entries[:5])
            assert logprobs[position] == pytest.approx(row[entries].tolist(), abs=TOLERANCE)
            assert logprobs[position] == sorted(logprobs[position], reverse=True)
            # Compares values, not ids: nearly equal entries may swap.
            assert min(logprobs[position][:5]) >= fifth_best - TOLERANCE


def test_logprobs_none_returns_null(server: Server):
    answer = server.generate([PROMPT], logprobs=None, max_tokens=2)
    assert answer["logprobs"] is None
    assert answer["logprob_token_ids"] is None


def test_tokens_outside_top_k_have_no_finite_logprob(server: Server):
    answer = server.generate([PROMPT], top_k=1, logprobs=2, max_tokens=3)
    for entries in answer["logprobs"][0]:
        assert entries[0] == pytest.approx(0.0, abs=1e-6)
        assert entries[1:] == [None] * (len(entries) - 1)


def test_200_prompts_come_back_in_order(server: Server, tiny_model: str):
    prompts = [[index + 10, 7, index + 10] for index in range(200)]
    answer = server.generate(prompts, temperature=0, max_tokens=3 + 1)
    assert answer["prompt_ids"] == prompts
    for index in (0, 57, 121, 199):
        expected = reference.greedy(tiny_model, prompts[index], 4)
        # A completion ends early at the end-of-text token (0).
        if 0 in expected:
            expected = expected[: expected.index(0) + 1]
        assert answer["completion_ids"][index] == expected


def test_both_workers_and_both_front_ends_serve(server: Server):
    pids = {server.get("/live").json()["pid"] for _ in range(200)}
    assert len(pids) == 2
    before = server.metrics("completed_jobs_total")
    server.generate([[index + 1] for index in range(40)], max_tokens=2)
    # Counters arrive with the next heartbeat.
    grown = lambda: [  # noqa: E731
        count > before[worker] for worker, count in server.metrics("completed_jobs_total").items()
    ]
    wait_until(lambda: grown() == [True, True], 20)
    assert server.get("/get_world_size/").json() == {"world_size": 2}


def test_completions_are_prompt_major(server: Server, tiny_model: str):
    answer = server.generate([[11, 12], [13, 14]], n=3, max_tokens=5, logprobs=0)
    assert len(answer["completion_ids"]) == 6
    for index, completion in enumerate(answer["completion_ids"]):
        prompt = [[11, 12], [13, 14]][index // 3]
        expected = reference.logprobs(tiny_model, prompt, completion)
        expected = expected[range(len(completion)), completion].tolist()
        assert flat(answer["logprobs"][index]) == pytest.approx(expected, abs=TOLERANCE)


def test_completions_of_equal_prompts_differ_without_a_seed(server: Server):
    completions = server.generate([PROMPT] * 16, max_tokens=12)["completion_ids"]
    assert len({tuple(ids) for ids in completions}) == 16


def test_a_seed_gives_the_same_ids_at_any_worker_and_in_any_batch(server: Server):
    prompts = [[index, index + 1] for index in range(20, 36)]
    options = {"max_tokens": 12, "n": 2, "generation_kwargs": {"seed": 1234}}
    first = server.generate(prompts, **options)["completion_ids"]
    again = server.generate(prompts, **options)["completion_ids"]
    alone = [ids for one in prompts for ids in server.generate([one], **options)["completion_ids"]]
    assert first == again == alone
    # The n completions of a prompt still differ.
    assert first[0] != first[1]


def test_text_is_tokenized_as_by_transformers(server: Server, tiny_model: str):
    from transformers import AutoTokenizer

    text = ["Hello, world", "def f(x):\n    return x  # ü"]
    answer = server.generate(text, max_tokens=1)
    assert answer["prompt_ids"] == AutoTokenizer.from_pretrained(tiny_model)(text)["input_ids"]


def test_tokens_prompt_objects_are_accepted(server: Server):
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": [1, 2], "cache_salt": "a"}]
    answer = server.generate(prompts, max_tokens=2, temperature=0)
    assert answer["prompt_ids"] == [PROMPT, [1, 2]]
    assert (
        answer["completion_ids"]
        == server.generate([PROMPT, [1, 2]], max_tokens=2, temperature=0)["completion_ids"]
    )


def test_truncation_keeps_the_last_ids(server: Server):
    answer = server.generate([[1, 2, 3, 4]], truncate_prompt_tokens=2, max_tokens=1)
    assert answer["prompt_ids"] == [[3, 4]]
    long = list(range(1, 701))
    answer = server.generate([long], truncate_prompt_tokens=-1, max_tokens=8)
    assert answer["prompt_ids"] == [long[-511:]]
    assert len(answer["completion_ids"][0]) == 1


def test_regular_expression_guides_the_completion(server: Server, tiny_model: str):
    from transformers import AutoTokenizer

    answer = server.generate(
        ["a date:"] * 3, structured_outputs_regex=r"20\d\d-[01]\d", max_tokens=16,
        generation_kwargs={"structured_outputs": {"regex": "never"}},
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for ids in answer["completion_ids"]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert len(text) == 7
        assert text.startswith("20")
        assert text[4] == "-"


@pytest.mark.parametrize(
    "options, check",
    [
        pytest.param({"max_tokens": 3}, lambda ids: len(ids) == 3, id="wins-over-the-field"),
        pytest.param(
            {"allowed_token_ids": [7, 8]}, lambda ids: set(ids) <= {7, 8}, id="allowed_token_ids"
        ),
        pytest.param({"logit_bias": {"9": 100}}, lambda ids: set(ids) == {9}, id="logit_bias"),
        pytest.param(
            {"logit_bias": {"9": 100}, "stop_token_ids": [9], "min_tokens": 4},
            lambda ids: len(ids) == 5 and ids[-1] == 9,
            id="min_tokens-and-stop_token_ids",
        ),
        pytest.param({"top_k": 0, "top_p": 0.9, "min_p": 0.01}, bool, id="truncated-sampling"),
        pytest.param({"presence_penalty": 1, "frequency_penalty": -1}, bool, id="penalties"),
        pytest.param({"bad_words": ["the"], "skip_special_tokens": False}, bool, id="bad_words"),
        pytest.param({"extra_args": {"a": 1}}, bool, id="extra_args"),
        pytest.param({"stop": ["e", "a", "i"]}, bool, id="stop-strings"),
    ],
)
def test_generation_kwargs_reach_the_sampler(server: Server, options, check):
    answer = server.generate([PROMPT], max_tokens=6, generation_kwargs=options)
    assert check(answer["completion_ids"][0])


def test_logprob_token_ids_select_the_logprobs(server: Server, tiny_model: str):
    answer = server.generate(
        [PROMPT], max_tokens=4, generation_kwargs={"logprob_token_ids": [3, 900]}
    )
    completion = answer["completion_ids"][0]
    expected = reference.logprobs(tiny_model, PROMPT, completion)
    for position, sampled in enumerate(completion):
        ids = answer["logprob_token_ids"][0][position]
        assert set(ids) == {3, 900, sampled}
        assert answer["logprobs"][0][position] == pytest.approx(
            expected[position][ids].tolist(), abs=TOLERANCE
        )


def test_a_completion_that_fills_the_context_ends_with_length(server: Server):
    answer = server.generate([list(range(1, 501))], max_tokens=100,
                             generation_kwargs={"ignore_eos": True})  # fmt: skip
    assert len(answer["completion_ids"][0]) == 12
    assert answer["finish_reasons"] == ["length"]
    assert answer["weight_versions"] == [[[0, 0]]]


def test_concurrent_requests_are_batched(server: Server):
    """They share the engines' steps: one after the other, they would take 64 each."""
    num_tokens = 64

    def send(index: int) -> None:
        prompt = [index + 1, 2, 3]
        answer = server.generate(
            [prompt], max_tokens=num_tokens, generation_kwargs={"ignore_eos": True}
        )
        assert answer["prompt_ids"] == [prompt]

    # One connection stays with one front end, which asks both workers for vLLM's metrics.
    with requests.Session() as session:

        def counts() -> list[float]:
            """Engine steps and tokens so far; empty: a worker has not sent them yet."""
            text = session.get(server.url + "/metrics", timeout=30).text
            names = ("iteration_tokens_total_count", "generation_tokens_total")
            found = [re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.M) for name in names]
            both = all(len(one) == 2 for one in found)
            return [sum(map(float, one)) for one in found] if both else []

        wait_until(lambda: bool(counts()), 15)
        before = counts()
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            list(pool.map(send, range(64)))
        deadline = time.monotonic() + 15
        while (after := counts())[1] - before[1] < 64 * num_tokens:
            assert time.monotonic() < deadline, (before, after)
    assert after[0] - before[0] < 64 * num_tokens / 8


def test_unknown_paths_and_methods_get_errors_in_json(server: Server):
    answer = server.post("/generat", {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = server.get("/generate/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
