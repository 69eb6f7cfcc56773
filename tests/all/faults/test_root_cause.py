"""The cause that a failed start reports when the engine process has died."""

from pathlib import Path

from harness.servers import Server, serve_process
from tests.conftest import ENGINE_OPTIONS
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


def test_an_engine_that_dies_while_warming_reports_the_cause(tiny_model: str, tmp_path: Path):
    process, url = serve_process(
        tiny_model, *ENGINE_OPTIONS, "--num-workers", "1", "--num-front-ends", "1",
        "--worker-extension-cls", "tests.kit.extensions.dying_extension.DyingExtension", log=tmp_path / "log",
    )  # fmt: skip
    server = Server(process, url, tmp_path / "log")
    try:
        assert process.wait(240) == 1
    finally:
        process.kill()
    conclusion = server.log.rpartition("\ntitopool: ")[2].partition("\n")[0]
    cause = "AssertionError: staged: no kernel for this step"
    assert conclusion == f"worker 0 could not start (warming): {cause}"
