"""AReaL 1.0.4's remote engine with its vLLM and its SGLang backend."""

from pathlib import Path

import pytest

from harness.servers import Server
from tests.clients.published import run_client
from tests.clients.scripts import ENGINE, PROMPT
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE
from tests.kit.models.weights import weights_client

SEQUENCE = [*PROMPT, 535, 78]

# A teacher's task: the log-probabilities of the last three tokens.
SCORED = f"""
import torch

sequence = {{"input_ids": torch.tensor([{SEQUENCE}]), "loss_mask": torch.tensor([[0, 0, 1, 1, 1]])}}
"""


def assert_generated(found: list[dict], folder: str) -> None:
    assert len(found) == 3
    for one in found:
        ids = one["output_tokens"]
        assert one["input_tokens"] == PROMPT
        assert 1 <= len(ids) <= 6
        assert one["stop_reason"] in ("stop", "length")
        expected = reference.logprobs(folder, PROMPT, ids)[range(len(ids)), ids].tolist()
        assert one["output_logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def assert_scored(scores: list[float], folder: str) -> None:
    rows = reference.logprobs(folder, SEQUENCE[:2], SEQUENCE[2:])
    expected = rows[range(3), SEQUENCE[2:]].tolist()
    assert scores == [0, 0, *(pytest.approx(one, abs=TOLERANCE) for one in expected)]


def test_generation_and_scores_by_the_vllm_backend(single_server: Server, tiny_model: str):
    script = """
from areal.engine.vllm_remote import VLLMBackend

engine = engine_of(VLLMBackend())
(scores,) = engine.compute_logp([sequence])
answer([asyncio.run(generated(engine, max_new_tokens=6, stop_token_ids=[0])), scores.tolist()])
"""
    found, (scores,) = run_client("areal", single_server.url, ENGINE + SCORED + script)
    assert_generated(found, tiny_model)
    assert_scored(scores, tiny_model)


def test_the_sglang_backend_with_weights_from_a_folder(
    single_server: Server, tiny_model: str, other_model: str, tmp_path: Path
):
    script = f"""
import time
from areal.api.cli_args import NameResolveConfig
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.sglang_remote import SGLangBackend
from areal.utils import name_resolve, names

options = dict(max_new_tokens=6, stop_token_ids=[0])
engine = engine_of(SGLangBackend())
before = asyncio.run(generated(engine, **options))
(scores,) = engine.compute_logp([sequence])
engine.config.experiment_name = engine.config.trial_name = "test"
name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root={str(tmp_path)!r}))
engine.pause_generation()
meta = WeightUpdateMeta(type="disk", path={other_model!r}, clear_checkpoint_after_load=False)
update = engine.update_weights_from_disk(meta)
# As the trainer says that it has saved the folder.
saved = names.update_weights_from_disk("test", "test", engine.get_version())
name_resolve.add(saved, str(time.time()))
update.result(60)
engine.continue_generation()
answer([before, scores.tolist(), asyncio.run(generated(engine, **options))])
"""
    try:
        before, (scores,), after = run_client("areal", single_server.url, ENGINE + SCORED + script)
    finally:
        client = weights_client(single_server)
        client.update_from_folder(tiny_model, version=0, policy="abort")
        client.close()
    assert_generated(before, tiny_model)
    assert_scored(scores, tiny_model)
    assert_generated(after, other_model)
