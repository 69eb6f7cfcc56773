"""Each benchmark runs to its end with its peers, as small as it can be: its figures mean nothing here."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness.servers import REPOSITORY
from titopool.settings.gpus import visible_gpus

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

TRL = str(Path(sys.prefix) / "trl" / "1.9.2")
# Words of the command by module; OUT becomes a path in the test's folder.
RUNS = {
    "abuse": ["foreign page"],
    "agent_turns": [
        "--turns", "2", "--chars", "200", "--rounds", "1", "--requests", "2", "--out", "OUT",
    ],
    "answers": ["/generate/ 64 × 4,000, logprobs 20"],
    "bench": [
        "--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--long-input-len", "16",
        "--long-output-len", "8", "--repeats", "1", "--trl", TRL, "--out", "OUT",
    ],
    "client_library": ["--requests", "8", "--rounds", "2"],
    "conversations": ["--targets", "bare engines", "vllm serve", "titopool", "--out", "OUT"],
    "exact": ["--batch", "4", "--max-tokens", "4", "--mismatch"],
    "groups --first-tokens": [
        "--targets", "titopool", "vllm serve", "--slots", "8", "--seconds", "1", "--widths", "4",
        "--many", "16", "--max-tokens", "16", "--mean", "8", "--out", "OUT",
    ],
    "gunicorn_workers": ["--repeats", "1"],
    "hostile": ["--mib", "1", "--at-once", "2"],
    "images": ["--num-images", "16", "--output-len", "2", "--out", "OUT"],
    "newcomer": [],
    "options": [],
    "oversubscription": ["--factors", "1.25", "--out", "OUT"],
    "parsed_streams": ["hermes", "--streams", "2", "--rounds", "1"],
    "parser_pace": ["hermes", "--streams", "2", "--step-ms", "5"],
    "parsers": ["hermes"],
    "placement": ["--num-workers", "2", "--num-seeds", "1"],
    "restarts": ["--num-workers", "1"],
    "scaling": [
        "--num-workers", "1", "--num-prompts", "4", "--output-len", "8", "--mean", "8",
        "--max-tokens", "16", "--repeats", "1", "--kill", "--out", "OUT",
    ],
    "streams": [
        "--num-streams", "1", "2", "--input-len", "8", "--output-len", "4", "--repeats", "1",
        "--out", "OUT",
    ],
    "watching": ["--pairs", "2", "--requests", "4"],
    "weights": ["--shape", "tiny", "--repeats", "1", "--out", "OUT"],
}  # fmt: skip
# Modules with a command that are not run, and why.
NOT_RUN = {
    "bare_engine": "a part of bench",
    "bare_groups": "a part of groups",
    "bare_images": "a part of images",
    "compare": "test_benchmarks.py calls it",
    "everything": "it runs bench, streams, conversations, images and front",
    "front": "test_benchmarks.py runs it",
    "grammars": "it needs a server that runs",
    "models": "a part of all",
    "raylets": "two GPUs",
    "report": "a part of bench",
    "trl_training": "two GPUs",
    "trl_training.timed": "two GPUs",
    "weights.bare": "a part of weights",
    "weights.lost_worker": "two GPUs",
    "weights.table": "a part of weights",
}


def test_each_benchmark_is_run_or_has_a_reason():
    folder = REPOSITORY / "benchmarks"
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__")
        for path in folder.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert found == {name.partition(" ")[0] for name in RUNS} | NOT_RUN.keys()


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.skipif(bool(visible_gpus()), reason="what is small for a CPU is not for a GPU")
def test_a_benchmark_runs(name: str, tmp_path: Path):
    module, *flags = name.split()
    words = [str(tmp_path / "out") if word == "OUT" else word for word in RUNS[name]]
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", *flags, *words],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=540)
    except subprocess.TimeoutExpired:
        # Its servers would outlive it, and stand beside the next tests.
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        for one in family:
            one.kill()
        raise
    assert process.returncode == 0, output[-4000:]
    assert "OUT" not in RUNS[name] or any(tmp_path.iterdir())
