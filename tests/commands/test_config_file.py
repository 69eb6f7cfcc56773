"""`--config FILE` and `TITOPOOL_CONFIG`: settings from YAML or TOML, and what is refused in them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.servers import REPOSITORY, environment, free_port, wait_until
from titopool.errors import ConfigError
from titopool.settings.config import SETTINGS, ServerConfig, as_text
from titopool.settings.sources import from_command_line, from_environment

YAML = """
model: some/model
num_workers: 1..8
exact: true
request_timeout_s: 1.5
allowed_hosts: [a.example, b.example]
engine_args: --seed 1
vllm:
  max-model-len: 8192
  enable_lora: true
  enable-prefix-caching: false
  hf-overrides: {a: 1}
  cudagraph-capture-sizes: [1, 2]
"""
TOML = """
model = "some/model"
num_workers = "1..8"
exact = true
request_timeout_s = 1.5
allowed_hosts = ["a.example", "b.example"]
engine_args = "--seed 1"
[vllm]
max-model-len = 8192
enable_lora = true
enable-prefix-caching = false
hf-overrides = {a = 1}
cudagraph-capture-sizes = [1, 2]
"""


def write(folder: Path, text: str, suffix: str = "yaml") -> str:
    path = folder / f"titopool.{suffix}"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "suffix, text", [("yaml", YAML), ("yml", YAML), ("toml", TOML)], ids=["yaml", "yml", "toml"]
)
def test_a_file_has_settings_and_vllms_options(tmp_path, suffix, text):
    config = from_command_line(["--config", write(tmp_path, text, suffix)], {})
    assert (config.model, config.num_workers, config.max_workers) == ("some/model", 1, 8)
    assert (config.exact, config.request_timeout_s) == (True, 1.5)
    assert config.allowed_hosts == ("a.example", "b.example")
    assert config.engine_argv == [
        "--seed", "1", "--max-model-len=8192", "--enable-lora", "--no-enable-prefix-caching",
        "--hf-overrides", '{"a": 1}', "--cudagraph-capture-sizes", "1", "2",
    ]  # fmt: skip


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path):
    path = write(tmp_path, "host: file\nport: 1\nlog_level: error\nvllm: {seed: 1}")
    environ = {
        "TITOPOOL_CONFIG": path, "TITOPOOL_PORT": "2", "TITOPOOL_LOG_LEVEL": "warning",
        "TITOPOOL_ENGINE_ARGS": "--seed 2",
    }  # fmt: skip
    config = from_command_line(["--log-level", "debug", "--seed", "3"], environ)
    assert (config.host, config.port, config.log_level) == ("file", 2, "debug")
    # vLLM takes the last.
    assert config.engine_argv == ["--seed=1", "--seed", "2", "--seed", "3"]
    assert from_environment(environ).port == 2
    assert from_command_line(["--engine-args=--seed 4"], environ).engine_argv == ["--seed", "4"]
    # A file on the command line stands in the place of the environment's.
    other = tmp_path / "other.toml"
    other.write_text('host = "other"')
    assert from_command_line([f"--config={other}"], environ).host == "other"
    assert from_command_line([f"--config={other}"], environ).log_level == "warning"


def test_every_setting_but_secrets_may_stand_in_a_file(tmp_path):
    defaults = ServerConfig()
    lines = [
        f"{name}: {json.dumps(as_text(getattr(defaults, name)))}"
        for name, item in SETTINGS.items()
        if not item.metadata["secret"]
    ]
    assert from_command_line(["--config", write(tmp_path, "\n".join(lines))], {}) == defaults


@pytest.mark.parametrize(
    "suffix, text, parts",
    [
        pytest.param("yaml", "\nprot: 1", ["line 2: prot:", "did you mean port?"], id="misspelt"),
        pytest.param("toml", "\n\nprot = 1", ["line 3: prot:", "did you mean port?"], id="misspelt-toml"),
        pytest.param("yaml", "vllm:\n  seed: 1\n  max-modle-len: 5",
            ["line 3: max-modle-len:", "did you mean max-model-len?"], id="vllms-misspelt"),
        pytest.param("toml", "port = 1\n[vllm]\nmax-modle-len = 5",
            ["line 3: max-modle-len:", "did you mean max-model-len?"], id="vllms-misspelt-toml"),
        pytest.param("yaml", "max-model-len: 5", ["line 1:", "below `vllm:`"], id="vllms-above"),
        pytest.param("yaml", "vllm: {tensor-parallel-size: 2}", ["tensor_parallel_size above"], id="ours-below"),
        pytest.param("yaml", "vllm: {config: a.yaml}", ["no file in a file"], id="a-file-in-a-file"),
        pytest.param("yaml", "vllm: 5", ["options of vLLM by name", "5"], id="no-table"),
        pytest.param("yaml", "vllm: {seed: null}", ["seed: expected a value"], id="null"),
        pytest.param("yaml", "api_key: s3cret", ["line 1:", "TITOPOOL_API_KEY", "api_key_file"], id="secret"),
        pytest.param("yaml", "port: many", ["line 1: port:", "whole number", "'many'"], id="no-number"),
        pytest.param("yaml", "port: [1]", ["line 1: port: expected one value"], id="a-list"),
        pytest.param("yaml", "port: 1\nhost: a\nport: 2", ["line 3: port: line 1 has it too"], id="repeated"),
        pytest.param("yaml", "- port", ["expected settings by name"], id="no-settings"),
        pytest.param("yaml", "port: [", ["expected YAML", "line 1"], id="no-yaml"),
        pytest.param("toml", "port = 1\nport = 2\n", ["expected TOML", "line 2"], id="no-toml"),
        pytest.param("json", "{}", [".yaml, .yml or .toml"], id="suffix"),
    ],
)  # fmt: skip
def test_what_a_file_may_not_have(tmp_path, suffix, text, parts):
    path = write(tmp_path, text, suffix)
    with pytest.raises(ConfigError) as caught:
        from_command_line(["--config", path], {})
    message = str(caught.value)
    assert message.startswith(path)
    assert "s3cret" not in message
    for part in parts:
        assert part in message


def test_a_missing_file_is_named():
    for argv, environ in ((["--config", "no.yaml"], {}), ([], {"TITOPOOL_CONFIG": "no.yaml"})):
        with pytest.raises(ConfigError, match=r"no.yaml: expected a file of settings"):
            from_command_line(argv, environ)
    with pytest.raises(ConfigError, match=r"--config: expected a value"):
        from_command_line(["--config"], {})
    with pytest.raises(ConfigError, match=r"TITOPOOL_CONFI: .*TITOPOOL_CONFIG\?"):
        from_environment({"TITOPOOL_CONFI": "a.yaml"})


def test_a_files_tags_make_no_objects(tmp_path):
    path = write(tmp_path, "model: !!python/object/apply:os.system ['true']")
    with pytest.raises(ConfigError, match="expected YAML"):
        from_command_line(["--config", path], {})


def test_the_example_is_accepted():
    config = from_command_line(["--config", str(REPOSITORY / "examples" / "titopool.yaml")], {})
    assert config.model == "Qwen/Qwen3-0.6B"
    assert "--max-model-len=8192" in config.engine_argv


def test_gunicorn_alone_reads_the_file_once(tmp_path, start_stub):
    """The file of a running server may change: its processes keep the settings of the start."""
    start_stub(0)
    port = free_port()
    endpoint = f"ipc://{tmp_path}/worker-0"
    path = write(
        tmp_path, f"port: {port}\nnum_front_ends: 2\nmax_queued_prompts: 7\nendpoints: {endpoint}"
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "app:create_app()"],
            env=environment(TITOPOOL_CONFIG=path), cwd=REPOSITORY, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        # Front ends are forked after the port is bound; they would refuse this file.
        wait_until(lambda: f":{port}" in log.read_text(), 30, log.read_text)
        Path(path).write_text("max_queued_prompts: -1")
        (front_end, *_) = _front_ends(process.pid)
        front_end.terminate()
        import requests

        def is_refused() -> bool:
            body = {"prompts": [[1]] * 8, "max_tokens": 1}
            try:
                url = f"http://127.0.0.1:{port}/generate/"
                return (
                    "(max_queued_prompts), got 8" in requests.post(url, json=body, timeout=30).text
                )
            except requests.RequestException:
                return False

        wait_until(is_refused, 30, log.read_text)
        assert "max_queued_prompts: expected" not in log.read_text()
    finally:
        process.terminate()
        process.wait(40)


def _front_ends(pid: int) -> list:
    import psutil

    wait_until(lambda: len(psutil.Process(pid).children()) >= 2, 30)
    return psutil.Process(pid).children()
