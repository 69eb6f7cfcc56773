"""/get_sequence_logprobs/ with real vLLM, compared with transformers in float32."""

import numpy as np
import pytest

from harness.servers import Server
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE
from tests.kit.peers.trl_client import run_trl

SEQUENCES = [[42, 1393, 14, 535, 78], list(range(100, 160)), [7, 8]]
LENGTHS = [2, 30, 2]


def expected_rows(folder: str, sequence: list[int], length: int) -> np.ndarray:
    """Log-probabilities of the whole vocabulary, [tokens after the prompt, vocabulary]."""
    if length == len(sequence):
        return np.zeros((0, 2048))
    return reference.logprobs(folder, sequence[:length], sequence[length:]).numpy()


@pytest.mark.parametrize("k", [1, 5, 100])
def test_json_has_the_top_k_and_the_sequence_s_own_tokens(server: Server, tiny_model: str, k: int):
    body = {"sequences": SEQUENCES, "prompt_lengths": LENGTHS, "top_logprobs": k}
    answer = server.post("/get_sequence_logprobs/", body).json()
    for index, (sequence, length) in enumerate(zip(SEQUENCES, LENGTHS, strict=True)):
        rows = expected_rows(tiny_model, sequence, length)
        values, ids = answer["logprobs"][index], answer["logprob_token_ids"][index]
        assert len(values) == len(ids) == len(rows)
        for row, own, got, got_ids in zip(rows, sequence[length:], values, ids, strict=True):
            assert own in got_ids
            assert len(got_ids) == len(set(got_ids)) == k + (own not in got_ids[:k])
            assert got == pytest.approx(row[got_ids].tolist(), abs=TOLERANCE)
            assert got[:k] == pytest.approx(sorted(row, reverse=True)[:k], abs=TOLERANCE)


def test_trl_client_scores_in_both_formats(server: Server, tiny_model: str):
    script = f"""
arguments = dict(sequences={SEQUENCES}, prompt_lengths={LENGTHS})
answer({{
    "binary": client.get_sequence_logprobs(**arguments),
    "json": client.get_sequence_logprobs(**arguments, use_binary=False),
    "chunks": client.get_sequence_logprobs(**arguments, top_logprobs=3, chunk_size=1),
}})
"""
    answers = run_trl("1.9.2", server.url, script)
    for index, (sequence, length) in enumerate(zip(SEQUENCES, LENGTHS, strict=True)):
        rows = expected_rows(tiny_model, sequence, length)
        own = rows[range(len(rows)), sequence[length:]].tolist()
        binary = answers["binary"]
        actual = [one[0] for one in binary["actual_logprobs"][index]]
        assert actual == pytest.approx(own, abs=TOLERANCE)
        assert [one[0] for one in binary["actual_token_ids"][index]] == sequence[length:]
        assert np.shape(binary["logprobs"][index]) in ((len(rows), 100), (0,))
        assert np.shape(answers["chunks"]["logprobs"][index]) in ((len(rows), 3), (0,))
        for position, values in enumerate(answers["json"]["logprobs"][index]):
            assert values[:100] == pytest.approx(binary["logprobs"][index][position], rel=1e-6)


def test_the_first_token_of_a_sequence_without_prompt_has_no_logprob(server: Server):
    body = {"sequences": [[5, 6, 7]], "prompt_lengths": [0], "top_logprobs": 2}
    answer = server.post("/get_sequence_logprobs/", body).json()
    assert [bool(one) for one in answer["logprobs"][0]] == [False, True, True]
    binary = server.post("/get_sequence_logprobs/", {**body, "response_format": "binary"}).json()
    assert binary["shape"] == [1, 3, 2]
    assert binary["completion_lengths"] == [3]


@pytest.mark.parametrize("changes, part", [
    ({"prompt_lengths": [1]}, "1 lengths for 2"),
    ({"sequences": [], "prompt_lengths": []}, "at least one"),
    ({"prompt_lengths": [1, 4]}, "prompt_lengths[1]"),
    ({"prompt_lengths": [-1, 1]}, "prompt_lengths[0]"),
    ({"sequences": [[1, 2], [3, 2048, 4]]}, "sequences[1][1]"),
    ({"sequences": [[1, 2], []]}, "sequences[1]"),
    ({"sequences": [[1, 2], [1] * 512]}, "511"),
    ({"top_logprobs": 129}, "top_logprobs"),
    ({"top_logprobs": 0}, "top_logprobs"),
    ({"temperature": 0}, "temperature"),
    ({"response_format": "text"}, "response_format"),
])  # fmt: skip
def test_bad_sequences_are_refused(server: Server, changes, part):
    body = {"sequences": [[1, 2], [3, 4, 5]], "prompt_lengths": [1, 1], "top_logprobs": 2}
    answer = server.post("/get_sequence_logprobs/", {**body, **changes})
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]
