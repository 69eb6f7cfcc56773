"""Keys of clients, without workers: from settings and from a file."""

import logging
import os
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from app import create_app
from app.conversations.store import Maker
from app.http.keys import Keys
from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig
from titopool.wire.sockets import read_curve_key
from workers.environment import default_engine_options, prepare_environment

ALICE, BOB, ROOT = "key-of-alice", "key-of-bob", "key-of-root"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list whose only item is the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr("app.http.keys.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def find(keys: Keys, text: str) -> str | None:
    key = keys.find(text.encode())
    return key.name if key else None


def status(client, path: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return client.post(path, data=b"{", headers=headers).status_code


def test_a_file_of_keys_opens_routes_by_key(tmp_path: Path):
    text = f"# comment\n\nalice {ALICE}\nbob\t{BOB}\nroot {ROOT} admin\n"
    file = write(tmp_path / "keys", text)
    client = create_app(ServerConfig(api_key_file=file)).test_client()
    # A call that is let in ends with 500: this process is no gunicorn worker.
    for key, generating, admin in [
        ("", 401, 401), ("alice", 401, 401), (ALICE, 500, 401), (BOB, 500, 401), (ROOT, 500, 400),
    ]:  # fmt: skip
        assert status(client, "/v1/responses", key) == generating, key
        assert status(client, "/pause", key) == admin, key
    # As the anthropic package sends it; a proxy's own Authorization does not hide it, a key there does.
    for headers, expected in [
        ({"x-api-key": ALICE}, 500),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "nobody's"}, 401),
        ({"x-api-key": ALICE, "Authorization": "Basic YTpi"}, 500),
        ({"x-api-key": ALICE, "Authorization": "Bearer nobody's"}, 401),
    ]:
        assert client.post("/v1/messages", data=b"{", headers=headers).status_code == expected


def test_a_file_without_an_admin_key_makes_nobody_an_administrator(tmp_path: Path):
    file = write(tmp_path / "keys", f"alice {ALICE}")
    client = create_app(ServerConfig(api_key_file=file, api_key=BOB)).test_client()
    assert (status(client, "/pause", ALICE), status(client, "/pause", BOB)) == (401, 401)
    client = create_app(ServerConfig(api_key=BOB)).test_client()
    assert status(client, "/pause", BOB) == 400


def test_a_session_s_key_opens_what_agents_call(tmp_path: Path):
    app = create_app(ServerConfig(api_key=ALICE, run_dir=str(tmp_path)))
    client, store = app.test_client(), app.extensions["titopool"].sessions
    made, other = (store.make(Maker("api_key", 1), {}) for _ in range(2))
    gone = store.make(Maker("a key that was removed", 1), {})
    key = f"session:{made}"
    # A call that is let in ends with 500: this process is no gunicorn worker.
    for path, expected in [
        ("/v1/responses", 500), (f"/sessions/{made}/v1/responses", 500), (f"/sessions/{other}/v1/responses", 404),
        ("/generate/", 401), ("/v1/chat/completions/tokens", 401), ("/pause", 401), ("/sessions", 401),
    ]:  # fmt: skip
        assert status(client, path, key) == expected, path
    for unknown in ("none", gone):
        assert status(client, "/v1/responses", f"session:{unknown}") == 404
    own = {"Authorization": f"Bearer {key}"}
    # As with any other key.
    assert client.get("/live", headers=own).status_code == 200
    assert client.get("/workers", headers=own).status_code == 401
    store.end(store.find(made))
    assert status(client, "/v1/responses", key) == 410


def test_keys_of_settings_and_of_the_file_work_together(tmp_path: Path):
    file = write(tmp_path / "keys", f"alice {ALICE}\nalice {BOB}\n")
    keys = Keys(ServerConfig(api_key_file=file, api_key="of-settings", admin_key=ROOT))
    assert [find(keys, one) for one in (ALICE, BOB, "of-settings", ROOT, "", "alice")] == [
        "alice", "alice", "api_key", "admin_key", None, None,
    ]  # fmt: skip
    assert keys.guard_administration


def test_a_key_has_the_weight_of_its_line(tmp_path: Path):
    text = f"a {ALICE}\nb {BOB}  weight=3\nroot {ROOT} admin weight=20\nb other weight=3\n"
    keys = Keys(ServerConfig(api_key_file=write(tmp_path / "keys", text), api_key="of-settings"))
    found = [keys.find(one.encode()) for one in (ALICE, BOB, ROOT, "other", "of-settings")]
    assert [one and (one.weight, one.is_admin) for one in found] == [
        (1, False), (3, False), (20, True), (3, False), (1, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, part",
    [
        *(
            (f"alice {ALICE} {word}", "line 1")
            for word in (
                "weight=0",
                "weight=-1",
                "weight=1.5",
                "weight=1000",
                "weight",
                "weight=2 admin",
            )
        ),
        (f"alice {ALICE} weight=2\nalice {BOB}", "one weight"),
        ("", "at least one key"),
        ("# alice key\n", "at least one key"),
        (ALICE, "line 1"),
        (f"alice {ALICE}\nbob {BOB} root", "line 2"),
        (f"al/ice {ALICE}", "line 1"),
        (f"alice {ALICE}\nbob {ALICE}", "once"),
    ],
)
def test_a_file_of_another_form_is_refused_without_showing_it(tmp_path: Path, text, part):
    with pytest.raises(ConfigError, match=part) as caught:
        Keys(ServerConfig(api_key_file=write(tmp_path / "keys", text)))
    assert ALICE not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o666])
def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, monkeypatch, mode: int):
    public, secret = zmq.curve_keypair()
    api, curve = tmp_path / "api", tmp_path / "curve"
    write(api, f"alice {ALICE}", mode)
    write(curve, secret.decode(), mode)
    # As if an ordinary user owned the files, also where root runs the tests.
    as_it_is = os.fstat

    def of_a_user(descriptor: int) -> os.stat_result:
        found = as_it_is(descriptor)
        return os.stat_result([*found[:4], 1000, *found[5:10]])

    with monkeypatch.context() as patch:
        patch.setattr("titopool.secret_files.os.fstat", of_a_user)
        for name, read in (
            ("api_key_file", lambda: Keys(ServerConfig(api_key_file=str(api)))),
            ("curve_key_file", lambda: read_curve_key(str(curve))),
        ):
            with pytest.raises(ConfigError, match=f"{name}: .*chmod 600"):
                read()
    curve.chmod(0o400)
    assert read_curve_key(str(curve)) == (public, secret)


def test_a_changed_file_is_followed_and_a_bad_one_is_not(tmp_path: Path, clock, caplog):
    path = tmp_path / "keys"
    keys = Keys(ServerConfig(api_key_file=write(path, f"alice {ALICE}")))
    # Replaced, as by editors and Kubernetes.
    os.replace(write(tmp_path / "new", f"bob {BOB} admin"), path)
    assert find(keys, ALICE) == "alice"
    clock[0] += 1.0
    assert (find(keys, ALICE), find(keys, BOB)) == (None, "bob")
    with caplog.at_level(logging.ERROR, "app"):
        for change in (
            lambda: write(path, "too many words here\n"),
            lambda: path.chmod(0o666),
            lambda: path.unlink(),
        ):
            change()
            for _ in range(3):
                clock[0] += 1.0
                assert find(keys, BOB) == "bob"
    assert len(caplog.records) == 3
    assert BOB not in caplog.text
    write(path, f"alice {ALICE}")
    clock[0] += 1.0
    assert (find(keys, ALICE), find(keys, BOB)) == ("alice", None)


def test_a_failure_is_logged_with_the_key_s_name(tmp_path: Path, caplog):
    file = write(tmp_path / "keys", f"alice {ALICE}")
    client = create_app(ServerConfig(api_key_file=file)).test_client()
    with caplog.at_level(logging.INFO, "app"):
        status(client, "/v1/responses", ALICE)
        status(client, "/v1/responses", "another-key")
    first, second = (one.getMessage() for one in caplog.records)
    assert " (key alice): " in first
    assert " failed with 401 " in second
    assert " (key " not in second
    assert ALICE not in caplog.text
    assert "another-key" not in caplog.text


def test_probes_show_processes_to_clients_with_a_key_only():
    client = create_app(ServerConfig(api_key="secret")).test_client()
    assert client.get("/live").json == {"status": "ok"}
    assert "pid" in client.get("/live", headers={"Authorization": "Bearer secret"}).json
    assert "pid" in create_app(ServerConfig()).test_client().get("/live").json


@pytest.mark.parametrize(
    "run_dir, is_used", [("/r", True), ("/" + "r" * 69, True), ("/" + "r" * 70, False), ("", False)]
)
def test_sockets_of_vllm_lie_in_the_run_dir(run_dir: str, is_used: bool):
    environ: dict[str, str] = {}
    default_engine_options(ServerConfig(run_dir=run_dir), environ, on_cpu=True, seed=0)
    assert environ.get("VLLM_RPC_BASE_PATH") == (run_dir if is_used else None)
    # As vLLM names them.
    assert not is_used or len(f"{run_dir}/{uuid.uuid4()}") <= 107


def test_a_process_that_runs_a_model_s_code_has_no_keys():
    environ = {"TITOPOOL_API_KEY": ALICE, "TITOPOOL_ADMIN_KEY": ROOT, "TITOPOOL_MODEL": "m"}
    prepare_environment(environ, on_cpu=True)
    assert {name for name in environ if name.startswith("TITOPOOL_")} == {"TITOPOOL_MODEL"}
