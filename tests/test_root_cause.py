"""The cause that a failed start reports when the engine process has died."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from tests.servers import Server, serve_process
from titopool.demo_model import VOCAB_SIZE, make_tokenizer
from titopool.settings.gpus import visible_gpus
from workers.supervisor.worker_log import root_cause

DEAD = "EngineDead: vLLM's engine process has ended"
CORE = "(EngineCore pid=7) ERROR 11-21 22:58:22 [core.py:1512] "
MAIN = "(MainProcess pid=3) ERROR 11-21 22:58:22 [async_llm.py:906] "
BEFORE = [
    "ImportError: staged, long before, and no harm",
    CORE + "EngineCore encountered a fatal error.",
    CORE + "Traceback (most recent call last):",
]
AFTER = [
    MAIN + "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See "
    "stack trace (above) for the root cause.",
    f"workers.engine.base.{DEAD}",
]


def test_the_cause_is_the_engine_s_first_exception():
    raised = CORE + "AssertionError: CPU GDN attention requires BF16."
    cause, lines = root_cause([*BEFORE, raised, *AFTER], DEAD)
    assert cause == "AssertionError: CPU GDN attention requires BF16."
    assert lines[-1] == raised


def test_the_cause_of_a_bare_assertion_has_its_statement():
    lines = [CORE + "    assert kind == 2", CORE + "           ^^^^^^^^^", CORE + "AssertionError"]
    cause, quoted = root_cause([*BEFORE, *lines, *AFTER], DEAD)
    assert cause == "AssertionError: assert kind == 2"
    assert quoted[-1] == lines[-1]


def test_the_cause_is_the_process_that_failed_first():
    raised = "(Worker_TP1 pid=9) ERROR 11-21 22:58:21 [multiproc.py:9] ValueError: no kernel"
    message = CORE + (
        "RuntimeError: Worker failed with error 'no kernel', please check the stack trace above "
        "for the root cause"
    )
    lines = [BEFORE[0], raised, *BEFORE[1:], message, *AFTER]
    assert root_cause(lines, DEAD)[0] == "ValueError: no kernel"


def test_a_killed_engine_has_no_cause_in_the_log():
    lines = [BEFORE[0], *AFTER]
    assert root_cause(lines, DEAD) == (DEAD, lines)


def test_a_failed_engine_start_has_the_engine_s_exception_as_cause():
    cause = "RuntimeError: Engine core initialization failed. See root cause above."
    raised = CORE + "ValueError: Available memory on node 0 is less than desired"
    found, _ = root_cause([raised, f"worker 0: {cause}"], cause)
    assert found == "ValueError: Available memory on node 0 is less than desired"


@pytest.mark.skipif(bool(visible_gpus()), reason="of vLLM's kernel for CPUs")
def test_an_engine_that_dies_while_warming_reports_the_cause(tmp_path: Path):
    make_tokenizer(tmp_path)
    config = Qwen3NextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    process, url = serve_process(
        str(tmp_path), "--dtype", "float32", "--max-model-len", "256", "--num-workers", "1",
        "--num-front-ends", "1", log=tmp_path / "log",
    )  # fmt: skip
    server = Server(process, url, tmp_path / "log")
    try:
        assert process.wait(240) == 1
    finally:
        process.kill()
    conclusion = server.log.rpartition("\ntitopool: ")[2].partition("\n")[0]
    assert conclusion == (
        "worker 0 could not start (warming): AssertionError: CPU GDN attention requires BF16."
    )
