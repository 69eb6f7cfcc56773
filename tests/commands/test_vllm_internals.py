"""The table of vLLM internals that titopool uses, its check at a start, and `titopool doctor`."""

import os
import platform
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness.servers import REPOSITORY, TITOPOOL, environment
from tests.conftest import ENGINE_OPTIONS
from titopool import __version__
from titopool.errors import ConfigError
from titopool.settings.gpus import visible_gpus
from titopool.settings.vllm_options import is_unknown, option_names
from workers import doctor
from workers.engine.start.options import has_decode_graphs
from workers.process import EXIT_FAILED
from workers.vllm_internals import (
    INTERNALS,
    SUPPORTED,
    Internal,
    check_internals,
    installed_version,
    missing,
    missing_for_images,
)

# `python -m workers` with an older vLLM.
WORKER_WITHOUT_TOLISTS = """
import sys
from vllm.v1.outputs import LogprobsTensors
from workers.__main__ import main
del LogprobsTensors.tolists
sys.exit(main(sys.argv[1:]))
"""
MISSING_METHOD = "vllm.v1.outputs:LogprobsTensors tolists"


@pytest.fixture
def older_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that lacks a method."""
    from vllm.v1.outputs import LogprobsTensors

    # It imports all modules that titopool uses.
    check_internals()
    monkeypatch.delattr(LogprobsTensors, "tolists")


@pytest.mark.parametrize("row", INTERNALS, ids=lambda row: f"{row.used_by}:{row.name}")
def test_the_installed_vllm_has_every_listed_name(row: Internal):
    assert missing(row) == []


@pytest.mark.parametrize("row", INTERNALS, ids=lambda row: f"{row.used_by}:{row.name}")
def test_the_module_that_uses_a_name_exists(row: Internal):
    source = (REPOSITORY / "workers" / row.used_by).read_text()
    words = [row.name.rpartition(":")[2], *row.needs]
    assert any(word.partition("(")[0] in source for word in words if word)


@pytest.mark.parametrize(
    "name, need",
    [
        ("vllm.no_such_module:Thing", ""),
        ("vllm.v1.outputs:NoSuchClass", ""),
        ("vllm.v1.outputs:LogprobsTensors", "no_such_method"),
        ("vllm.v1.outputs:LogprobsTensors", "tolists(no_such_parameter)"),
        ("vllm.v1.outputs:LogprobsTensors", "no_such_method | nor_this_one"),
    ],
)
def test_a_missing_name_is_found(name: str, need: str):
    row = Internal("engine/vllm.py", name, (need,) if need else (), "a test")
    assert missing(row) == [f"{name} {need}".strip()]


def test_a_missing_name_refuses_the_start(older_vllm):
    with pytest.raises(ConfigError, match=f"vLLM {installed_version()} has no {MISSING_METHOD}"):
        check_internals()


def test_a_missing_name_that_only_images_need_allows_the_start(monkeypatch):
    from vllm.multimodal.processing import BaseMultiModalProcessor

    assert missing_for_images() == []
    monkeypatch.delattr(BaseMultiModalProcessor, "_find_mm_placeholders")
    check_internals()
    (missing,) = missing_for_images()
    assert missing.endswith(" _find_mm_placeholders")


def test_a_worker_does_not_start_with_an_incomplete_vllm(tiny_model, tmp_path):
    words = ["--endpoint", f"ipc://{tmp_path}/socket", tiny_model, *ENGINE_OPTIONS]
    variables = {} if visible_gpus() else {"VLLM_TARGET_DEVICE": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", WORKER_WITHOUT_TOLISTS, *words],
        env=environment(**variables), cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == EXIT_FAILED
    (line,) = [line for line in ended.stderr.splitlines() if MISSING_METHOD in line]
    assert "in_model/logprobs_patch.py" in line
    assert "titopool doctor" in line
    assert "Traceback" not in ended.stderr


def test_the_doctor_finds_nothing_missing_on_this_machine(tmp_path):
    ended = subprocess.run(
        [TITOPOOL, "doctor"], env=environment(), cwd=tmp_path, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert {
        f"python {platform.python_version()}",
        f"titopool {__version__}",
        f"vllm {installed_version()}",
        "all is well",
    } <= set(lines)
    for start in ("torch ", "transformers ", "pyzmq "):
        assert any(line.startswith(start) for line in lines), start
    # Free ones, and those that a process of this machine has.
    for port in ("8000", "51216"):
        assert any(
            line.startswith(("port ", "expected a free port")) and port in line for line in lines
        )
    assert any(line.startswith("GPU 0") if visible_gpus() else "no GPU" in line for line in lines)
    assert any(line.startswith("NCCL ") for line in lines)
    assert f"vLLM internals: {len(INTERNALS)} of {len(INTERNALS)} ok" in lines
    assert len(lines) < 20


def test_the_doctor_lists_what_vllm_lacks(older_vllm, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "prepare_environment", lambda environ, **arguments: None)
    assert doctor.main([]) == 1
    assert f"missing: {MISSING_METHOD}" in capsys.readouterr().out.splitlines()


def test_the_doctor_works_without_vllm(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "prepare_environment", lambda environ, **arguments: None)
    monkeypatch.setattr(doctor, "installed_version", lambda: "")
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "vllm missing" in output
    assert "missing: vLLM 0.25.1 to 0.33: pip install" in output
    assert "vLLM internals" not in output


def test_the_doctor_shows_gpus_and_nccl(monkeypatch, capsys, tmp_path):
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771 MiB, 143000 MiB'\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "_nccl_version", lambda: "2.27.3")
    assert doctor._report_gpus(["0"]) == []
    output = capsys.readouterr().out
    assert "GPU 0, NVIDIA H200, 143771 MiB, 143000 MiB\n" in output
    assert "NCCL 2.27.3\n" in output
    monkeypatch.setattr(doctor, "_nccl_version", lambda: "")
    (missing,) = doctor._report_gpus(["0"])
    assert missing.startswith("NCCL")


def test_the_doctor_reports_a_port_in_use(monkeypatch, capsys):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(doctor, "TRL_PORT", port)
        doctor._report_ports()
    assert f"expected a free port, got {port}, which process" in capsys.readouterr().out


def test_the_supported_versions_match_the_package_s_requirement():
    first, last = SUPPORTED.split(" to ")
    minor = int(last.removeprefix("0."))
    assert f"vllm>={first},<0.{minor + 1}\n" in (REPOSITORY / "setup.cfg").read_text()


def test_the_document_shows_the_table():
    text = (REPOSITORY / "docs" / "vllm-internals.md").read_text()
    shown = [line for line in text.splitlines() if line.startswith("| `workers/")]
    assert shown == [
        f"| `workers/{row.used_by}` | `{row.name}` | "
        + ", ".join(f"`{need.replace('|', 'or')}`" for need in row.needs)
        + f" | {row.purpose}{' (images only)' * row.is_for_images} |"
        for row in INTERNALS
    ]


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("FULL_AND_PIECEWISE", True), ("FULL_DECODE_ONLY", True), ("FULL", False),
        ("PIECEWISE", False), ("NONE", False),
    ],
)  # fmt: skip
def test_steps_that_only_decode_have_graphs_of_their_own_in_two_modes(mode, expected):
    from vllm.config.compilation import CUDAGraphMode

    graphs = SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode])
    assert has_decode_graphs(SimpleNamespace(compilation_config=graphs)) is expected


def test_option_names_match_vllms_parser():
    """For the installed vLLM: `option_names` reads its source, which may change with a version."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    names = set(parser._option_string_actions)
    found = option_names()
    assert len(names) > 200
    assert found is not None
    assert [name for name in names if is_unknown(name)] == []
    # The parser handles these two before argparse sees them.
    assert sorted(found - names) == ["--config", "-O"]
