"""Keeps requests in flight while weights are updated.

    python -m benchmarks.weights.load URL MODEL NUM_REQUESTS INPUT_LEN OUTPUT_LEN

A process of its own, so that the trainer's times have no other work in them. Each of NUM_REQUESTS
threads sends one request after another with random ids, until the input ends. Prints a line when all
threads send, and at the end how many requests ended with each status. Only ids that the small
tokenizer knows are sampled: with others, detokenizing takes longer with each token.
"""

import collections
import json
import random
import sys
import threading
from typing import Any

import requests

from benchmarks.models import PROMPT_IDS

# vLLM takes at most 1,024.
SAMPLED_IDS = list(PROMPT_IDS[-1000:])


def main() -> None:
    url, model, *numbers = sys.argv[1:]
    num_requests, input_len, output_len = map(int, numbers)
    statuses: collections.Counter[str] = collections.Counter()
    stops, all_ready = threading.Event(), threading.Barrier(num_requests + 1)

    def body() -> dict[str, Any]:
        return {
            "model": model, "prompt": random.choices(PROMPT_IDS, k=input_len),
            "max_tokens": output_len, "ignore_eos": True, "allowed_token_ids": SAMPLED_IDS,
        }  # fmt: skip

    def send() -> None:
        following = body()
        all_ready.wait()
        while not stops.is_set():
            try:
                answer = requests.post(f"{url}/v1/completions", json=following)
                status = "200" if answer.ok else f"{answer.status_code} {answer.text[:200]}"
            except requests.RequestException as error:
                status = type(error).__name__
            statuses[status] += not stops.is_set()
            following = body()

    for _ in range(num_requests):
        threading.Thread(target=send, daemon=True).start()
    all_ready.wait()
    print("{}", flush=True)
    sys.stdin.read()
    stops.set()
    print(json.dumps(statuses), flush=True)


main()
