"""Routed experts from vLLM to JSON: real vLLM, on CPUs with Triton's interpreter."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson
import pytest

from app.outputs import replay
from app.outputs.json_parts import json_parts
from harness.servers import Server
from tests.clients.published import run_client
from tests.clients.scripts import ENGINE, PROMPT
from tests.kit.models import routed_experts
from tests.kit.models.routed_experts import (
    CHECKS,
    NUM_CHOSEN,
    NUM_LAYERS,
    assert_routed,
    make_mixture,
    mixture_server,
)
from titopool.wire.messages import RoutedExperts, SamplingMask


def written(value: Any) -> Any:
    """What a client reads of a value in an answer."""
    return orjson.loads(b"".join(json_parts(value)))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_mixture(tmp_path_factory.mktemp("mixture") / "model", seed=0)


@pytest.fixture(scope="module")
def mixtures(mixture: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    working = tmp_path_factory.mktemp("mixtures")
    with mixture_server(mixture, working) as server:
        yield server


# `check_sglang` reads the same answer; tests/clients/test_areal.py has AReaL's other calls.
@pytest.mark.variant
def test_areal_reads_the_rows(mixtures: Server, mixture: str):
    """AReaL's SGLang backend, unchanged, with `return_routed_experts`; before a check changes weights."""
    script = """
from areal.engine.sglang_remote import SGLangBackend

engine = engine_of(SGLangBackend())
engine.config.return_routed_experts = True

async def routed():
    options = GenerationHyperparameters(max_new_tokens=4, top_k=50)
    found = await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=options))
    await (await workflow_context.get_aiohttp_session()).close()
    return found

found = asyncio.run(routed())
answer([found.output_tokens, found.routed_experts.tolist()])
"""
    ids, rows = run_client("areal", mixtures.url, ENGINE + script)
    shape = (len(PROMPT) + len(ids) - 1, NUM_LAYERS, NUM_CHOSEN)
    packed = RoutedExperts(np.array(rows, np.int32).tobytes(), shape, "int32", 0)
    choice = {"token_ids": ids, "routed_experts": written(replay.experts_json(packed, None))}
    assert_routed(mixture, PROMPT, choice)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_experts_are_those_of_the_router(
    mixtures: Server, mixture: str, check: Callable[[Server, str], None]
):
    check(mixtures, mixture)


def test_large_mixtures_have_two_bytes_an_expert():
    rows = np.arange(12, dtype=np.uint16).reshape(2, 3, 2) * 300
    packed = RoutedExperts(rows.tobytes(), rows.shape, "uint16", 5)
    sent = written(replay.experts_json(packed, None))
    assert next(iter(sent)) == "data"
    assert (routed_experts.experts_of({"routed_experts": sent}) == rows).all()
    assert sent["start"] == 5


# Made by hand: of the prompt [7, 8, 9] and 2 tokens, from token 1 on; 2 layers, 2 of 8 experts.
PACKED = RoutedExperts(bytes([0, 0, 6, 2, 0, 0, 1, 4, 0, 0, 7, 3]), (3, 2, 2), "uint8", 1)


@pytest.mark.parametrize(
    ("start", "num_rows", "rows"),
    [(1, 3, [[[0, 0], [6, 2]], [[0, 0], [1, 4]], [[0, 0], [7, 3]]]), (2, 2, [[[0, 0], [1, 4]], [[0, 0], [7, 3]]]),
     (2, 1, [[[0, 0], [1, 4]]]), (4, 0, [])],
    ids=["all", "later", "scored", "none"],
)  # fmt: skip
def test_sglang_s_form_is_int32(start: int, num_rows: int, rows: list):
    sent = written(replay.experts_int32(PACKED, start=start, num_rows=num_rows))
    assert sent is not None
    found = np.frombuffer(base64.b64decode(sent), np.int32)
    assert found.reshape(num_rows, 2, 2).tolist() == rows


def test_a_prompt_that_was_not_computed_has_no_rows_in_sglang_s_form():
    assert replay.experts_int32(PACKED, start=1, num_rows=4) is None
    nothing = RoutedExperts(b"", (0, 2, 2), "uint8", 0)
    assert replay.experts_int32(nothing, start=0, num_rows=2) is None


def test_masks_are_lists_of_ids():
    ids, counts = np.array([4, 5, 6], np.int32), np.array([2, 0, 1], np.int32)
    mask = SamplingMask(ids.tobytes(), counts.tobytes())
    assert written(replay.mask_lists(mask)) == [[4, 5], [], [6]]
