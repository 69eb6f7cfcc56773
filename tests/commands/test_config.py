"""Settings: the command line overrides the environment, the environment overrides defaults."""

from pathlib import Path

import pytest

from titopool.errors import ConfigError
from titopool.settings import vllm_options
from titopool.settings.config import ServerConfig
from titopool.settings.sources import (
    check_model,
    from_command_line,
    from_environment,
    ignored_variables,
)
from workers.supervisor.hub import wanted_model


def test_command_line_wins_over_environment_and_defaults():
    environ = {"TITOPOOL_PORT": "9000", "TITOPOOL_NUM_WORKERS": "3", "OTHER": "x"}
    config = from_command_line(["some/model", "--port=9001"], environ)
    assert (config.model, config.port, config.num_workers) == ("some/model", 9001, 3)
    assert config.host == "127.0.0.1"


def test_other_options_go_to_vllm_after_those_of_the_environment():
    argv = ["--dtype", "float32", "--num-workers", "2", "--hf-overrides", '{"a": 1}', "-tp", "2"]
    config = from_command_line(argv, {"TITOPOOL_ENGINE_ARGS": "--max-model-len 4096"})
    assert config.engine_argv == [
        "--max-model-len", "4096", "--dtype", "float32", "--hf-overrides", '{"a": 1}',
    ]  # fmt: skip
    assert (config.model, config.num_workers, config.tensor_parallel_size) == ("", 2, 2)


def test_the_model_may_follow_settings():
    config = from_command_line(["--port", "9000", "some/model", "--dtype", "float32"], {})
    assert (config.model, config.port) == ("some/model", 9000)


def test_a_switch_needs_no_value():
    assert from_command_line(["--exact", "some/model"], {}).exact
    assert from_command_line(["--exact", "some/model"], {}).model == "some/model"
    assert not from_command_line(["--exact=false"], {"TITOPOOL_EXACT": "1"}).exact
    assert not from_command_line([], {}).exact
    assert from_environment(ServerConfig(exact=True).to_environment()).exact
    # On by default, so it takes a value.
    assert not from_command_line(["--metrics", "false", "some/model"], {}).metrics
    for words, environ in ([["--exact=maybe"], {}], [[], {"TITOPOOL_EXACT": "maybe"}]):
        with pytest.raises(ConfigError, match="expected true or false, got 'maybe'"):
            from_command_line(words, environ)


@pytest.mark.parametrize(
    "words",
    [
        ["--compilation-config.mode", "3"], ["--compilation_config.mode=3"], ["-cc.mode=3"],
        ["-O3"], ["-O", "3"], ["-q", "awq"], ["-qawq"], ["--no-enable-prefix-caching"],
        ["--max_model_len", "-1"], ["--gpu-memory-utilization=.5"], ["--seed", "-1"],
        ["--hf-overrides", "{\"--a\": 1}"], ["--additional-config", "-x y"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_form_of_vllm_option_goes_to_vllm(words):
    assert from_command_line(words, {}).engine_argv == words


def test_without_vllms_source_only_misspelt_settings_are_refused(monkeypatch):
    monkeypatch.setattr(vllm_options, "option_names", lambda: None)
    assert from_command_line(["--something", "5"], {}).engine_argv == ["--something", "5"]
    with pytest.raises(ConfigError, match="--num-workers"):
        from_command_line(["--num-worker", "5"], {})


@pytest.mark.parametrize(
    "file, environ, argv, workers",
    [
        ("1..8", {}, [], (1, 8)),
        ("1..8", {}, ["--num-workers", "2"], (2, 0)),
        ("1..8", {"TITOPOOL_NUM_WORKERS": "2"}, [], (2, 0)),
        (None, {"TITOPOOL_NUM_WORKERS": "1..8"}, ["--num-workers=2"], (2, 0)),
        (None, {"TITOPOOL_NUM_WORKERS": "1..2"}, ["--num-workers", "4"], (4, 0)),
        (None, {"TITOPOOL_NUM_WORKERS": "4"}, ["--num-workers", "1..2"], (1, 2)),
        ("1..8", {}, ["--max-workers", "4"], (1, 4)),
        ("1..8", {}, ["--num-workers", "2", "--max-workers", "4"], (2, 4)),
        # A maximum that was set by its own name goes on above a number.
        (None, {"TITOPOOL_MAX_WORKERS": "8"}, ["--num-workers", "2"], (2, 8)),
        (None, {"TITOPOOL_MAX_WORKERS": "4"}, ["--num-workers", "1..8"], (1, 8)),
        (None, {}, ["--num-workers", "1..8", "--num-workers", "2"], (2, 0)),
        (None, {"TITOPOOL_NUM_WORKERS": "0"}, ["--max-workers", "4"], (0, 4)),
    ],
)  # fmt: skip
def test_a_number_of_workers_wins_over_a_range_below_it(
    tmp_path: Path, file: str | None, environ, argv, workers: tuple[int, int]
):
    if file is not None:
        (tmp_path / "a.yaml").write_text(f"num_workers: {file}\n")
        argv = ["--config", str(tmp_path / "a.yaml"), *argv]
    config = from_command_line(argv, environ)
    assert (config.num_workers, config.max_workers) == workers
    # As child processes read them.
    assert from_environment(config.to_environment()) == config


def test_a_range_beside_a_maximum_is_refused(tmp_path: Path):
    file = tmp_path / "a.yaml"
    for lines in ("num_workers: 1..8\nmax_workers: 4\n", "max_workers: 4\nnum_workers: 1..8\n"):
        file.write_text(lines)
        with pytest.raises(ConfigError, match=r"a\.yaml, line 2: .*expected max_workers once"):
            from_command_line(["--config", str(file)], {})
    both = {"TITOPOOL_NUM_WORKERS": "1..8", "TITOPOOL_MAX_WORKERS": "4"}
    with pytest.raises(ConfigError, match="TITOPOOL_MAX_WORKERS: expected max_workers once"):
        from_environment(both)


def test_child_processes_read_the_same_settings():
    config = ServerConfig(
        model="m", curve_key_file="k", endpoints=("tcp://a:1", "ipc:///x"), request_timeout_s=1.5
    )
    assert from_environment(config.to_environment()) == config


@pytest.mark.parametrize(
    "argv, environ, parts",
    [
        pytest.param([], {"TITOPOOL_NUM_WORKER": "1"}, ["TITOPOOL_NUM_WORKERS"], id="misspelt-variable"),
        pytest.param(["--num-worker", "2"], {}, ["--num-workers"], id="misspelt-option"),
        pytest.param(["--nam-workers", "2"], {}, ["--nam-workers", "--num-workers?"], id="ours-misspelt"),
        pytest.param(["--max-modle-len=5"], {}, ["--max-modle-len:", "--max-model-len?"], id="vllms-misspelt"),
        pytest.param(["--no-enforce-eagre"], {}, ["--no-enforce-eagre:"], id="vllms-negated-misspelt"),
        pytest.param(["-zz", "2"], {}, ["-zz: neither titopool nor vLLM"], id="short-option"),
        pytest.param([], {"TITOPOOL_ENGINE_ARGS": "--max-modle-len 5"}, ["--max-model-len?"], id="in-a-variable"),
        pytest.param(["a", "b"], {}, ["one MODEL", "'a'", "'b'"], id="two-models"),
        pytest.param(["--port", "x"], {}, ["--port", "'x'"], id="no-number"),
        pytest.param(["--port"], {}, ["--port", "value"], id="no-value"),
        pytest.param(["--port", "70000"], {}, ["port", "65535"], id="no-port"),
        pytest.param(["--num-workers", "-1"], {}, ["num_workers", "-1"], id="negative"),
        pytest.param([], {"TITOPOOL_REQUEST_TIMEOUT_S": "nan"}, ["request_timeout_s"], id="nan"),
        pytest.param(["--request-timeout-s", "inf"], {}, ["request_timeout_s", "finite", "inf"], id="infinite"),
        pytest.param([], {"TITOPOOL_HEARTBEAT_TIMEOUT_S": "1e400"}, ["heartbeat_timeout_s", "finite"], id="overflow"),
        pytest.param(["--num-workers", "4", "--max-workers", "2"], {}, ["max_workers", "at least num_workers (4)", "2"], id="maximum-below"),
        pytest.param(["--num-workers", "4"], {"TITOPOOL_MAX_WORKERS": "2"}, ["max_workers", "at least num_workers (4)"], id="maximum-below-a-number"),
        pytest.param(["--api-key", "s"], {}, ["TITOPOOL_API_KEY"], id="secret-in-the-open"),
        pytest.param(["--endpoints", "tcp://a:1"], {}, ["curve_key_file"], id="tcp-without-key"),
        pytest.param(["--endpoints", "http://a:1"], {}, ["http://a:1"], id="no-endpoint"),
        pytest.param(["--log-level", "loud"], {}, ["log_level", "loud"], id="no-level"),
        pytest.param([], {"TITOPOOL_ENGINE_ARGS": "'"}, ["engine_args"], id="open-quote"),
        pytest.param(["--placement", "random"], {}, ["placement", "prefix, least_loaded or round_robin", "random"], id="no-placement"),
        pytest.param(["--heartbeat-timeout-s", "0.6"], {}, ["heartbeat"], id="contradiction"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(argv, environ, parts):
    with pytest.raises(ConfigError) as caught:
        from_command_line(argv, environ)
    for part in parts:
        assert part in str(caught.value)


# Set by Kubernetes for the Services `titopool` (two ports, one named) and `titopool-worker`.
SERVICES = {
    "TITOPOOL_SERVICE_HOST": "10.96.0.12",
    "TITOPOOL_SERVICE_PORT": "8000",
    "TITOPOOL_SERVICE_PORT_HTTP": "8000",
    "TITOPOOL_PORT": "tcp://10.96.0.12:8000",
    "TITOPOOL_PORT_8000_TCP": "tcp://10.96.0.12:8000",
    "TITOPOOL_PORT_8000_TCP_PROTO": "tcp",
    "TITOPOOL_PORT_8000_TCP_PORT": "8000",
    "TITOPOOL_PORT_8000_TCP_ADDR": "10.96.0.12",
    "TITOPOOL_PORT_9_UDP": "udp://[fd00::1]:9",
    "TITOPOOL_PORT_9_UDP_ADDR": "fd00::1",
    "TITOPOOL_WORKER_SERVICE_HOST": "10.96.0.13",
    "TITOPOOL_WORKER_SERVICE_PORT": "5555",
    "TITOPOOL_WORKER_PORT": "tcp://10.96.0.13:5555",
    "TITOPOOL_WORKER_PORT_5555_TCP": "tcp://10.96.0.13:5555",
}


def test_variables_of_kubernetes_services_are_ignored():
    assert ignored_variables(SERVICES) == sorted(SERVICES)
    assert from_environment(SERVICES) == ServerConfig()
    assert from_environment(SERVICES | {"TITOPOOL_PORT": "9000"}) == ServerConfig(port=9000)


@pytest.mark.parametrize(
    "key, value",
    [
        ("TITOPOOL_PORT", "tcp:9000"),
        ("TITOPOOL_PORTS", "tcp://10.96.0.12:8000"),
        ("TITOPOOL_SERVICE_HOST", "localhost"),
        ("TITOPOOL_SERVICE_PORT", "any"),
        ("TITOPOOL_SERVICE_HOSTS", "10.96.0.12"),
        ("TITOPOOL_PORT_8000_TCP_ADDR", "worker"),
        ("TITOPOOL_PORT_8000", "tcp://10.96.0.12:8000"),
        ("TITOPOOL_HOSTS", "10.96.0.12"),
    ],
)
def test_a_variable_that_only_resembles_a_service_is_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        from_environment({key: value})


NO_MODELS = ["/no/such", "./no", "../no", "~/no", "a/b/c", "{folder}", "{folder}/none"]
PASSED = [
    "", "gpt2", "Qwen/Qwen3-8B", "org/name:Q4_K_M", "org/name/file.gguf", "s3://bucket/a/b", "{model}",
]  # fmt: skip


@pytest.mark.parametrize("model", NO_MODELS)
def test_a_path_without_a_model_is_refused_before_a_start(model, tmp_path):
    model = model.format(folder=tmp_path)
    with pytest.raises(ConfigError, match="model: expected a folder") as caught:
        check_model(ServerConfig(model=model))
    assert f"got {model}" in str(caught.value)
    # The disk of a worker elsewhere is not this one.
    check_model(ServerConfig(model=model, cluster="ray"))
    check_model(ServerConfig(model=model, endpoints=("ipc:///x",)))
    assert wanted_model(ServerConfig(model=model), {}) is None


@pytest.mark.parametrize("model", PASSED)
def test_a_hubs_name_and_what_only_vllm_knows_pass(model, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    check_model(ServerConfig(model=model.format(model=tmp_path)))


def test_a_model_whose_config_is_elsewhere_passes(tmp_path):
    check_model(ServerConfig(model=str(tmp_path), engine_args="--hf-config-path org/name"))
