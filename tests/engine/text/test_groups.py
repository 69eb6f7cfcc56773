"""Groups on a real engine of 8 slots: a slot is a completion's, and a wide group begins with what is
free.
"""

import heapq
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from harness.servers import KV_CACHE, Server, running_server, wait_until

NUM_SLOTS = 8
OPTIONS = (
    *KV_CACHE, "--num-workers", "1", "--num-front-ends", "2", "--dtype", "float32", "--max-model-len", "1024",
    "--max-num-seqs", str(NUM_SLOTS), "--heartbeat-interval-s", "0.1",
)  # fmt: skip
# A token of this model is one of these with a probability of about 1/40.
ENDING = {"stop_token_ids": list(range(1000, 1050))}


@pytest.fixture(scope="module")
def groups(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("groups") / "log"
    with running_server(tiny_model, *OPTIONS, log=log) as server:
        yield server


def engine_counts(server: Server) -> tuple[int, int]:
    """Steps of the engine, and tokens that it made."""
    text = server.get("/metrics").text
    names = ("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total")
    found = [re.search(rf"^{name}{{.*}} (\S+)", text, re.M) for name in names]
    steps, tokens = (int(float(one[1])) if one else 0 for one in found)
    return steps, tokens


def fewest_steps(lengths: list[int]) -> int:
    """Steps for completions of these lengths, each in the first free slot."""
    ends = [0] * NUM_SLOTS
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def test_groups_of_different_lengths_fill_the_slots(groups: Server):
    steps_before, tokens_before = engine_counts(groups)
    prompts = [[5, 6, 7, index] for index in range(32)]
    answer = groups.generate(prompts, n=4, max_tokens=400, generation_kwargs=ENDING)
    lengths = list(map(len, answer["completion_ids"]))
    assert len(lengths) == 128
    # Of the same group, too.
    assert np.mean([np.std(lengths[at : at + 4]) for at in range(0, 128, 4)]) > 10
    num_tokens = tokens_before + sum(lengths)
    wait_until(lambda: engine_counts(groups)[1] == num_tokens, 10)
    steps = engine_counts(groups)[0] - steps_before
    # At least 7 of 8 slots are busy, but for the tail that these lengths have in any order of work.
    assert steps <= fewest_steps(lengths) * NUM_SLOTS / 7, (steps, fewest_steps(lengths))


def test_completions_of_a_wide_group_have_their_index_and_its_seed(groups: Server):
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}
    wide = groups.generate([[9, 8, 7]], n=20, generation_kwargs={"seed": 100}, **fields)
    assert len(wide["completion_ids"]) == 20
    for index in (0, 7, 8, 19):
        seed = {"seed": 100 + index}
        alone = groups.generate([[9, 8, 7]], generation_kwargs=seed, **fields)
        assert alone["completion_ids"][0] == wide["completion_ids"][index]


def test_a_group_scores_its_prompt_once_and_as_one_completion_does(groups: Server):
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 2, "prompt_logprobs": 1}
    one, three = (groups.post("/v1/completions", body | {"n": n}).json()["choices"] for n in (1, 3))
    assert len(three) == 3
    for choice in three:
        assert choice["prompt_logprobs"] == one[0]["prompt_logprobs"]


def test_small_requests_pass_a_group_that_is_wider_than_the_slots(groups: Server):
    fields = {"n": 100, "max_tokens": 200, "generation_kwargs": ENDING}
    with ThreadPoolExecutor() as threads:
        wide = threads.submit(groups.generate, [[1, 2, 3]], **fields)
        wait_until(lambda: sum(groups.metrics("sequences").values()) >= NUM_SLOTS - 1, 10)
        small = 0
        while not wide.done():
            assert len(groups.generate([[small % 500]], max_tokens=2)["completion_ids"]) == 1
            small += 1
        assert len(wide.result()["completion_ids"]) == 100
    # The slots were the wide group's 12 times over.
    assert small > 20


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_abort_ends_also_what_has_not_started(groups: Server, is_streamed: bool):
    body = {
        "prompt": [4, 4, 4], "n": 20, "max_tokens": 1000, "ignore_eos": True,
        "stream": is_streamed, "return_token_ids": True,
    }  # fmt: skip
    headers, reasons = {"X-Request-Id": "wide"}, dict[int, str]()
    lengths = dict.fromkeys(range(20), 0)

    def read() -> None:
        answer = groups.post("/v1/completions", body, headers=headers, stream=True)
        for line in answer.iter_lines():
            event = line.removeprefix(b"data: ")
            for choice in json.loads(event)["choices"] if event.startswith(b"{") else ():
                lengths[choice["index"]] += len(choice.get("token_ids") or ())
                if choice.get("finish_reason"):
                    reasons[choice["index"]] = choice["finish_reason"]

    def ask() -> None:
        answer = groups.post("/v1/completions", body, headers=headers)
        for choice in answer.json()["choices"]:
            reasons[choice["index"]] = choice["finish_reason"]
            lengths[choice["index"]] = len(choice["token_ids"])

    thread = threading.Thread(target=read if is_streamed else ask)
    thread.start()
    wait_until(lambda: sum(groups.metrics("sequences").values()) == NUM_SLOTS, 10)
    assert groups.post("/abort_requests", {"request_ids": ["wide"]}).json()["aborted"] == 1
    thread.join(30)
    assert reasons == dict.fromkeys(range(20), "abort")
    # Those without a slot had no token.
    assert all(lengths[index] == 0 for index in range(NUM_SLOTS, 20))
    wait_until(lambda: sum(groups.metrics("sequences").values()) == 0, 5)


def test_a_wide_group_outlives_its_worker(groups: Server):
    children = psutil.Process(groups.process.pid).children(recursive=True)
    (worker,) = (one for one in children if "--worker-id" in one.cmdline())
    with ThreadPoolExecutor() as threads:
        fields = {"n": 24, "max_tokens": 60, "generation_kwargs": {"ignore_eos": True}}
        wide = threads.submit(groups.generate, [[3, 3]], **fields)
        wait_until(lambda: sum(groups.metrics("sequences").values()) == NUM_SLOTS, 10)
        worker.kill()
        assert list(map(len, wide.result(180)["completion_ids"])) == [60] * 24
