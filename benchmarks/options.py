"""What the dearest options of a completion cost at each of its tokens, in vLLM's own code, on one thread.

    python -m benchmarks.options

Stop strings are compared on the worker's event loop, the others are read within the engine's step. A
step costs so much for each completion that has the option.
"""

import random
import time
from collections.abc import Callable

import torch

from benchmarks.bench import say
from titopool.settings.sampling import (
    MAX_ENTRIES,
    MAX_PATTERN_SIZE,
    MAX_PATTERN_TOKENS,
    MAX_TEXT_BYTES,
)

NUM_TOKENS, VOCAB_SIZE, NUM_COMPLETIONS = 4000, 151_936, 64
# The best of some rounds: other processes run.
ROUNDS, CALLS = 5, 20


def us_of(call: Callable[[], object]) -> float:
    """Microseconds of a call."""
    found = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - began_s) / CALLS)
    return 1e6 * min(found)


def stops(num: int, num_bytes: int) -> float:
    from vllm.v1.engine.detokenizer import check_stop_strings

    text, length = "the text of a model " * NUM_TOKENS, max(3, num_bytes // num)
    # Of the text's own letters, which need the most comparisons.
    strings = [f"{number:x}".rjust(length, "e") for number in range(num)]
    return us_of(lambda: check_stop_strings(text, 4, strings, False))


def bad_words(num: int) -> float:
    """Words of one token, with and without a space, which match at each token."""
    from vllm.v1.sample.ops.bad_words import apply_bad_words

    logits = torch.zeros(NUM_COMPLETIONS, VOCAB_SIZE)
    one_token = [[token] for token in range(2 * num)]
    words = dict.fromkeys(range(NUM_COMPLETIONS), one_token)
    past = [list(range(NUM_TOKENS))] * NUM_COMPLETIONS
    return us_of(lambda: apply_bad_words(logits, words, past)) / NUM_COMPLETIONS


def biases(num: int) -> float:
    """With the tensors that are made anew at each step in which a request comes or goes."""
    from vllm.v1.sample.logits_processor import builtin
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    logits = torch.zeros(NUM_COMPLETIONS, VOCAB_SIZE)
    processor = builtin.LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    processor.biases = {index: dict.fromkeys(range(num), 1.0) for index in range(NUM_COMPLETIONS)}
    left = BatchUpdate(NUM_COMPLETIONS, removed=[NUM_COMPLETIONS - 1], added=[], moved=[])

    def step() -> None:
        processor.biases[NUM_COMPLETIONS - 1] = processor.biases[0]
        processor.update_state(left)
        processor.apply(logits)

    return us_of(step) / NUM_COMPLETIONS


def repetitions(size: int, min_count: int) -> float:
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.core.sched.utils import check_sequence_repetition

    ids = random.Random(0).choices(range(1000), k=NUM_TOKENS)
    params = RepetitionDetectionParams(size, 1, min_count)
    return us_of(lambda: check_sequence_repetition(ids, params))


def main() -> None:
    torch.set_num_threads(1)
    most, texts = MAX_ENTRIES, MAX_TEXT_BYTES
    count = MAX_PATTERN_TOKENS // MAX_PATTERN_SIZE
    rows = {
        "64 stop strings": stops(64, 0),
        f"{most['stop']} stop strings of {texts['stop']} bytes": stops(most["stop"], texts["stop"]),
        "10,000 stop strings": stops(10_000, 0),
        f"{most['bad_words']} bad words": bad_words(most["bad_words"]),
        "300 logit biases": biases(300),
        f"{most['logit_bias']} logit biases": biases(most["logit_bias"]),
        f"patterns of up to {MAX_PATTERN_SIZE} tokens": repetitions(MAX_PATTERN_SIZE, count),
        f"patterns of up to {NUM_TOKENS // 2} tokens": repetitions(NUM_TOKENS // 2, 2),
    }
    say("| options of a completion | microseconds a token |")
    say("|---|---|")
    for name, found in rows.items():
        say(f"| {name} | {found:.0f} |")


if __name__ == "__main__":
    main()
