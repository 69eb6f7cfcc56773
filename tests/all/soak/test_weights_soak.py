"""The memory of an engine over many weight updates.

`make test-all PART=soak` runs more updates, and clients at the same time.
"""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from harness.servers import Server, need_gpus
from tests.kit.models.weights import assert_serves, weights_client
from tests.kit.trainers.trainer import tensors_of

SOAK_UPDATES = int(os.environ.get("SOAK_UPDATES", "1000"))
NUM_CLIENTS = 24
# Allowed growth of an engine over the first measurement. Unless oneDNN's cache is limited, this
# many batch sizes add 200 to 300 MiB.
MAX_GROWTH_BYTES = 100 * 2**20


@pytest.fixture
def server(single_server: Server) -> Server:
    need_gpus(2)
    return single_server


@pytest.fixture
def folders(tiny_model: str, other_model: str) -> list[str]:
    """Two sets of weights; the server starts with the first."""
    return [tiny_model, other_model]


def engine_bytes(server: Server) -> int:
    """Memory of vLLM's processes, and of the worker that started them."""
    total = 0
    for process in psutil.Process(server.process.pid).children(recursive=True):
        words = process.cmdline()
        if "VLLM" in words[0] or "--worker-id" in words:
            total += process.memory_info().rss
    assert total > 0
    return total


def test_an_engine_does_not_grow_with_updates(server: Server, folders: list[str]):
    tensors = [tensors_of(folder) for folder in folders]
    client = weights_client(server, timeout_s=60)
    # Each prompt makes a batch of another size; the first and the last prompts are equally long.
    lengths = iter([*range(101, 501, 2), *range(100, 500, 2)])
    seen = []
    for number in range(1, 151):
        client.update(tensors[number % 2], policy="keep")
        for length in (next(lengths), next(lengths)):
            server.generate([[5] * length], max_tokens=1)
        if number % 50 == 0:
            seen.append(engine_bytes(server))
    client.close()
    assert_serves(server, folders[0])
    assert seen[-1] - seen[0] < MAX_GROWTH_BYTES, [one >> 20 for one in seen]


@contextmanager
def clients(server: Server) -> Iterator[list[int]]:
    """Sends requests without end during the block; yields the number of answered requests."""
    answered, is_over = [0], threading.Event()

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        while not is_over.is_set():
            prompt = [rng.randrange(1, 2000) for _ in range(rng.randrange(1, 100))]
            num_tokens = rng.randrange(1, 200)
            options = {"ignore_eos": True}
            answer = server.generate([prompt], max_tokens=num_tokens, generation_kwargs=options)
            assert len(answer["completion_ids"][0]) == num_tokens
            answered[0] += 1

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield answered
    finally:
        is_over.set()
        for thread in threads:
            thread.join(120)


@pytest.mark.timeout(300 + 5 * SOAK_UPDATES)
def test_an_engine_does_not_grow_under_load(server: Server, folders: list[str]):
    tensors = [tensors_of(folder) for folder in folders]
    client = weights_client(server, timeout_s=60)
    seen = []
    with clients(server) as answered:
        for number in range(1, SOAK_UPDATES + 1):
            client.update(tensors[number % 2], policy="keep")
            if number % max(1, SOAK_UPDATES // 20) == 0:
                seen.append(engine_bytes(server))
                print(f"{number} updates, {answered[0]} requests, {seen[-1] >> 20} MiB", flush=True)
    client.close()
    assert_serves(server, folders[SOAK_UPDATES % 2])
    # After a quarter of the updates, batches have had all their sizes.
    growth = max(seen[len(seen) // 2 :]) - max(seen[: len(seen) // 4])
    assert growth < MAX_GROWTH_BYTES, [one >> 20 for one in seen]
