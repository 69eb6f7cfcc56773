"""Weights in bfloat16, which vLLM chooses by itself for most models; the other tests use float32."""

import numpy as np

from harness.servers import running_server
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models import reference

PROMPT = [5, 6, 7, 8, 9]
# bfloat16 has 8 bits of precision; a wrong kernel is off by whole units.
TOLERANCE = 0.3


def test_a_model_in_bfloat16_is_near_transformers_in_float32(tiny_model, tmp_path):
    """Linux must have permitted the tiles that a CPU with AMX computes the attention in."""
    with running_server(
        tiny_model, *ENGINE_OPTIONS, "--dtype", "bfloat16", log=tmp_path / "log"
    ) as server:
        answer = server.generate([PROMPT], max_tokens=8, temperature=0.0)
    (ids,), (entries,) = answer["completion_ids"], answer["logprobs"]
    rows = reference.logprobs(tiny_model, PROMPT, ids)
    expected = [float(row[one]) for row, one in zip(rows, ids, strict=True)]
    difference = np.abs(np.array(expected) - [one[0] for one in entries])
    assert 1e-4 < difference.max() < TOLERANCE
