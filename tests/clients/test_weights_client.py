"""The trainer's client when the server, or a proxy before it, does not respond correctly."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest

from harness.servers import ipv6_listener, wait_until
from tests.kit.peers.fake_server import Answer, Body, FakeServer, reply
from titopool.client.weights.server_calls import own_address
from titopool.client.weights_client import WeightsClient, WeightsError
from titopool.wire.rendezvous import GLOO_PREFIX, ID_KEY, rank_key

# The client's timeout; a test that runs into it has failed.
TIMEOUT_S = 60.0
SOON_S = 20.0


HTML = b"<html><title>Please log in</title></html>"
ODD_ANSWERS = {
    "html": (reply(HTML), "Please log in"),
    "html-refusal": (reply(HTML, "502 Bad Gateway"), "Please log in"),
    "list": (reply([1]), "JSON object"),
    "null": (reply(None), "JSON object"),
    "other-json": (reply({"ok": True}), "world_size"),
    "wrong-type": (reply({"world_size": "2"}), "world_size"),
    "no-utf8": (reply(b"\xff\xfe{}"), "JSON object"),
    "very-deep": (reply(b"[" * 100_000), "JSON object"),
    "empty": (reply(b""), "JSON object"),
    "cut-body": (reply(b"{", length=50), "IncompleteRead"),
    "cut-refusal": (reply(b"{", "409 Conflict", length=50), "409"),
    "refusal-without-fields": (reply({"error": "no"}, "409 Conflict"), "409"),
    "refusal-of-another": (reply({"detail": "Not Found"}, "404 Not Found"), "Not Found"),
    "no-http": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "BadStatusLine"),
    "cut-head": (b"HTTP/1.1 200 OK\r\nContent-Le", "/get_world_size"),
    "nothing": (b"", "RemoteDisconnected"),
}


@pytest.fixture
def fake() -> Iterator[Callable[[Answer], FakeServer]]:
    started: list[FakeServer] = []

    def start(answer: Answer) -> FakeServer:
        started.append(FakeServer(answer))
        return started[-1]

    yield start
    for server in started:
        server.close()


def client_of(server: FakeServer, **options: Any) -> WeightsClient:
    return WeightsClient(server.url, device="cpu", timeout_s=TIMEOUT_S, **options)


def listening_ports() -> set[int]:
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


# ---- calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD_ANSWERS)
def test_any_bad_response_raises_a_weights_error(fake, name: str):
    answer, text = ODD_ANSWERS[name]
    client = client_of(fake(lambda path, body: answer))
    with pytest.raises(WeightsError, match=re.escape(text)) as caught:
        client.open()
    assert str(caught.value).startswith("/get_world_size: ")
    status = re.match(rb"HTTP/1.1 ([45]\d\d)", answer)
    assert caught.value.status == (int(status[1]) if status else 0)
    assert not client.is_open


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1", "http://127.0.0.1:port", "127.0.0.1:8000", "http://no.invalid", ""],
)
def test_an_unreachable_url_raises_a_weights_error(url: str):
    with pytest.raises(WeightsError):
        WeightsClient(url, device="cpu").open()


def test_a_refusal_raises_the_server_s_message(fake):
    error = {"error": {"message": "the state is closed", "code": "conflict"}}
    client = client_of(fake(lambda path, body: reply(error, "409 Conflict")))
    with pytest.raises(WeightsError, match="/resume: the state is closed") as caught:
        client.resume()
    assert (caught.value.status, caught.value.code) == (409, "conflict")


# ---- the group -----------------------------------------------------------------------


def responses_to_init() -> dict[str, tuple[bytes, str]]:
    refusal = {"error": {"message": "another trainer is there", "code": "conflict"}}
    return {
        "refusal": (reply(refusal, "409 Conflict"), "another trainer is there"),
        **{name: ODD_ANSWERS[name] for name in ("html", "html-refusal", "cut-body", "no-http", "nothing")},
    }  # fmt: skip


@pytest.mark.parametrize("joins", ["nobody", "dies", "all"])
@pytest.mark.parametrize("name", responses_to_init())
def test_a_failed_open_ends_at_once_with_the_cause(fake, name: str, joins: str):
    """With no worker, with a worker that dies, and with only the server's response lost."""
    last, text = responses_to_init()[name]
    groups: list[Any] = []

    def answer(path: str, body: Body) -> bytes:
        if path == "/get_world_size":
            return reply({"world_size": 1})
        assert path == "/weights/init"
        if joins != "nobody":
            groups.append(join_as_worker(body, completes=joins == "all"))
        return last

    client = client_of(fake(answer))
    before = listening_ports()
    begin = time.monotonic()
    with pytest.raises(WeightsError, match=re.escape(text)) as caught:
        client.open()
    assert time.monotonic() - begin < SOON_S
    assert not client.is_open
    groups.clear()
    # Also while the test still holds the error.
    wait_until(lambda: listening_ports() <= before, 5, lambda: str(caught.value))


def join_as_worker(body: Body, *, completes: bool) -> Any:
    """Joins the group like a worker; one that dies has only announced itself."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    limit = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(body["host"], body["port"], 2, False, timeout=limit)
    store.set(rank_key(1), b"1")
    store.wait([ID_KEY])
    return ProcessGroupGloo(PrefixStore(GLOO_PREFIX, store), 1, 2, limit) if completes else None


def test_an_exception_in_the_init_thread_ends_open(fake, monkeypatch: pytest.MonkeyPatch):
    client = client_of(fake(lambda path, body: reply({"world_size": 1})))
    call = client.call

    def fails(path: str, *arguments: Any, **options: Any) -> Any:
        if path == "/weights/init":
            raise MemoryError("staged")
        return call(path, *arguments, **options)

    monkeypatch.setattr(client, "call", fails)
    begin = time.monotonic()
    with pytest.raises(WeightsError, match="MemoryError: staged"):
        client.open()
    assert time.monotonic() - begin < SOON_S


def test_a_wrong_begin_response_raises_a_weights_error(fake):
    """The group forms, but the response of /weights/begin is wrong."""

    def answer(path: str, body: Body) -> bytes:
        if path == "/get_world_size":
            return reply({"world_size": 1})
        if path == "/weights/init":
            groups.append(join_as_worker(body, completes=True))
            return reply({})
        return reply({"update": 3})

    import torch

    groups: list[Any] = []
    client = client_of(fake(answer))
    before = listening_ports()
    with pytest.raises(WeightsError, match="/weights/begin: expected a JSON object with update"):
        client.update([("w", torch.zeros(2))], policy="keep")
    assert not client.is_open
    groups.clear()
    wait_until(lambda: listening_ports() <= before, 5)


class StubGroup:
    """Stands in for `TrainerGroup`; the method in `fails` raises `error`."""

    backend, port, device_uuid = "gloo", 1, ""
    fails = ""
    error: Exception = RuntimeError("staged")

    def __init__(self, *_: Any, **__: Any):
        self._run("init")

    def form(self, **_: Any) -> None:
        self._run("form")

    def broadcast(self, message: Any, check_workers: Callable[[], None]) -> Callable[[], None]:
        self._run("broadcast")
        if self.fails == "check":
            check_workers()
        return lambda: self._run("wait")

    def abort(self) -> None:
        self._run("abort")

    def _run(self, step: str) -> None:
        if step == self.fails:
            raise self.error


@pytest.fixture
def stub_group(monkeypatch: pytest.MonkeyPatch) -> type[StubGroup]:
    class Group(StubGroup):
        """A class of the test's own."""

    monkeypatch.setattr("titopool.client.weights_client.TrainerGroup", Group)
    return Group


class WholeServer:
    """A server that accepts every call, for `fake`."""

    def __init__(self, **responses: Any):
        self.calls: list[str] = []
        self._responses = {
            "/get_world_size": {"world_size": 2},
            "/weights/begin": {"update": "u", "missing": [], "ignored": [], "kept": []},
            "/weights/commit": {"version": 1, "lost": []},
            **{f"/{name.replace('__', '/')}": body for name, body in responses.items()},
        }

    def __call__(self, path: str, body: Body) -> bytes:
        self.calls.append(path)
        response = self._responses.get(path, {})
        return reply(response.pop(0) if isinstance(response, list) else response)


def test_a_group_that_lost_a_member_is_replaced_at_the_next_update(fake, stub_group):
    import torch

    lost = [{"endpoint": "ipc:///w1", "error": "killed"}]
    commits = [{"version": 1, "lost": lost}, {"version": 2, "lost": []}]
    server = WholeServer(weights__commit=commits)
    client = client_of(fake(server))
    assert client.update([("w", torch.zeros(2))], policy="keep")["lost"] == lost
    assert not client.is_open
    assert client.update([("w", torch.zeros(2))], policy="keep")["lost"] == []
    assert client.is_open
    assert [one for one in server.calls if one in ("/weights/init", "/weights/close")] == [
        "/weights/init", "/weights/close", "/weights/init",
    ]  # fmt: skip


# ---- a commit whose answer is lost ----------------------------------------------------


def status_of(**fields: Any) -> dict[str, Any]:
    return {
        "worker": "w", "endpoint": "ipc:///w", "state": "open", "update": None, "last_update": "old",
        "weight_version": 4, "waits_for_weights": False, "is_restarting": False, "last_end": None,
        "last_staging": "beside", "last_update_s": 0.5, "last_paused_s": 0.1, **fields,
    }  # fmt: skip


APPLIED = status_of(last_update="u", weight_version=5)
APPLYING = status_of(update="u", state="applying")
RECEIVING = status_of(update="u", state="receiving")
DROPPED = status_of(last_end="not within 3 s")
SILENT = {"worker": None, "endpoint": "ipc:///v", "state": "unreachable"}
LATE = reply({"error": {"message": "late", "code": "deadline_passed"}}, "504 Gateway Timeout")
LOST = {"lost": b"", "proxy": reply(HTML, "504 Gateway Timeout"), "late": LATE}


def lost_commit(*looks: list[dict[str, Any]] | None, answer: bytes = b"") -> WholeServer:
    """A server whose commit has this answer, then shows its workers so (the last look repeats)."""
    shown = list(looks)

    class Server(WholeServer):
        def __call__(self, path: str, body: Body) -> bytes:
            if path == "/weights/commit":
                self.calls.append(path)
                return answer
            if path == "/weights":
                now = shown.pop(0) if len(shown) > 1 else shown[0]
                return b"" if now is None else reply({"workers": now})
            return super().__call__(path, body)

    return Server()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titopool.client.weights_client.POLL_S", 0.01)
    monkeypatch.setattr("titopool.client.weights_client.REASON_TIMEOUT_S", 0.1)


@pytest.mark.parametrize("name", LOST)
def test_new_weights_that_serve_are_a_success_without_an_answer(fake, stub_group, quick, name: str):
    looks = ([APPLYING, APPLYING], None, [APPLIED, APPLYING], [APPLIED, SILENT])
    server = lost_commit(*looks, answer=LOST[name])
    client = client_of(fake(server))
    found = client.update(tensors(), policy="keep")
    assert (found["version"], found["loaded"], found["update_s"]) == (5, None, 0.5)
    assert found["lost"] == [{"endpoint": "ipc:///v", "error": "unreachable"}]
    assert "/weights/abort" not in server.calls
    assert not client.is_open


@pytest.mark.parametrize(
    "looks, words",
    [
        ([[DROPPED, SILENT], [DROPPED]], "not within 3 s; the old weights serve"),
        ([[RECEIVING]] * 30 + [[DROPPED]], "the old weights serve"),
        ([[status_of(waits_for_weights=True)]], "restart or wait for weights: w"),
    ],
)
def test_an_update_that_was_dropped_is_an_error_that_says_so(
    fake, stub_group, quick, looks: list[Any], words: str
):
    server = lost_commit(*looks)
    client = client_of(fake(server))
    with pytest.raises(WeightsError, match=words):
        client.update(tensors(), policy="keep")
    assert "/weights/abort" in server.calls
    assert not client.is_open


@pytest.mark.parametrize("look", [None, [SILENT], [3], [DROPPED, SILENT]])
def test_a_client_says_that_it_does_not_know_which_weights_serve(
    fake, stub_group, quick, monkeypatch: pytest.MonkeyPatch, look: Any
):
    monkeypatch.setattr(WeightsClient, "_call_timeout_s", 0.3)
    with pytest.raises(WeightsError, match="not known whether the new weights serve") as caught:
        client_of(fake(lost_commit(look))).update(tensors(), policy="keep")
    assert "the old weights serve" not in str(caught.value)


def test_a_refused_commit_is_final(fake, stub_group, quick):
    refusal = {"error": {"message": "no; the old weights serve", "code": "conflict"}}
    server = lost_commit([APPLIED], answer=reply(refusal, "409 Conflict"))
    with pytest.raises(WeightsError, match="no; the old weights serve"):
        client_of(fake(server)).update(tensors(), policy="keep")


# ---- pauses --------------------------------------------------------------------------

PAUSE = {"mode": "drain", "lease_s": 60}


@pytest.mark.parametrize(
    "answer, options, resumes",
    [
        (reply({"status": "paused"}), PAUSE, True),
        (b"", PAUSE, True),
        (LATE, PAUSE, True),
        (reply({"error": {"message": "paused", "code": "conflict"}}, "409 Conflict"), PAUSE, False),
        (reply({"status": "paused"}), {"mode": {1}, "lease_s": 60}, False),
        # The lease has ended, and what is paused then is another client's.
        (reply({"status": "paused"}), {"mode": "drain", "lease_s": 0.001}, False),
    ],
    ids=["paused", "lost", "late", "refused", "not-sent", "ended"],
)
def test_the_end_of_the_block_ends_a_pause_of_its_own_only(
    fake, answer: bytes, options: Any, resumes: bool
):
    server = WholeServer()
    respond = lambda path, body: answer if path == "/pause" else server(path, body)  # noqa: E731
    with client_of(fake(respond)) as client:
        try:
            client.pause(options["mode"], lease_s=options["lease_s"])
        except WeightsError:
            pass
        time.sleep(0.01)
    assert ("/resume" in server.calls) == resumes


def test_a_refused_renewal_keeps_the_pause(fake):
    refusal = {"error": {"message": "drain", "code": "conflict"}}
    answers = [reply({}), reply(refusal, "409 Conflict")]
    server = WholeServer()
    respond = lambda path, body: answers.pop(0) if path == "/pause" else server(path, body)  # noqa: E731
    with client_of(fake(respond)) as client:
        client.pause("keep", lease_s=60)
        with pytest.raises(WeightsError, match="drain"):
            client.pause("drain", lease_s=60)
    assert server.calls == ["/resume"]


# ---- only WeightsError ---------------------------------------------------------------


def tensors(num: int = 3) -> list[tuple[str, Any]]:
    import torch

    return [(f"w{index}", torch.zeros(2)) for index in range(num)]


@pytest.mark.parametrize(
    "error", [RuntimeError("staged"), OSError("staged"), ValueError("staged"), KeyError("staged")]
)
@pytest.mark.parametrize("step", ["init", "form", "broadcast", "wait"])
def test_a_failure_of_the_group_raises_a_weights_error(fake, stub_group, step: str, error: Any):
    """At each step; the server hears of an update that had begun, and the next one works."""
    server = WholeServer()
    client = client_of(fake(server), chunk_bytes=0)
    stub_group.fails, stub_group.error = step, error
    with pytest.raises(WeightsError, match="staged") as caught:
        client.update(tensors(), policy="keep")
    assert caught.value.__cause__ is error
    assert not client.is_open
    assert ("/weights/abort" in server.calls) == (step in ("broadcast", "wait"))
    stub_group.fails = ""
    assert client.update(tensors(), policy="keep")["version"] == 1


def test_a_failure_after_the_commit_only_drops_the_group(fake, stub_group):
    """The workers have received everything, and serve the new weights."""
    client = client_of(fake(WholeServer()))
    stub_group.fails = "wait"
    assert client.update(tensors(), policy="keep")["version"] == 1
    assert not client.is_open


def test_a_group_that_cannot_be_aborted_is_dropped(fake, stub_group):
    client = client_of(fake(WholeServer()))
    client.open()
    stub_group.fails = "abort"
    client.close()
    assert not client.is_open


def test_a_worker_that_has_left_the_group_is_named(fake, stub_group):
    left = {"workers": [{"worker": "w1", "session": "", "last_end": "killed"}]}
    server = WholeServer(weights=left)
    client = client_of(fake(server))
    stub_group.fails = "check"
    with pytest.raises(WeightsError, match="got worker w1 outside: killed; the old weights serve"):
        client.update(tensors(), policy="keep")
    assert server.calls[-1] == "/weights/abort"
    assert not client.is_open


@pytest.mark.parametrize("workers", [[3], [None], ["w"]])
def test_odd_workers_raise_a_weights_error(fake, stub_group, workers: Any):
    client = client_of(fake(WholeServer(weights={"workers": workers})))
    stub_group.fails = "check"
    with pytest.raises(WeightsError):
        client.update(tensors(), policy="keep")


def test_too_little_memory_raises_a_weights_error(
    fake, stub_group, monkeypatch: pytest.MonkeyPatch
):
    import torch

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("staged")

    server = WholeServer()
    client = client_of(fake(server))
    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(WeightsError, match="OutOfMemoryError: staged; the old weights serve"):
        client.update(tensors(), policy="keep")
    assert server.calls[-1] == "/weights/abort"


def test_tensors_that_change_end_the_update_at_the_server(fake, stub_group):
    """With a text that says what was announced and what came."""
    passes = iter([tensors(3), tensors(2)])
    server = WholeServer()
    client = client_of(fake(server))
    with pytest.raises(WeightsError, match=r"expected w2 .*, got no more; pass tensors that"):
        client.update(lambda: next(passes), policy="keep")
    assert server.calls[-1] == "/weights/abort"
    assert not client.is_open


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_a_server_without_ranks_is_refused(fake, num_ranks: int):
    client = client_of(fake(WholeServer(get_world_size={"world_size": num_ranks})))
    with pytest.raises(WeightsError, match=f"expected at least 1, got {num_ranks}"):
        client.open()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"device": "nonsense"}, "device: expected .*, got nonsense"),
        ({"device": 3.5}, "device: expected .*, got 3.5"),
        ({"api_key": "two\nlines"}, "/get_world_size"),
        ({"api_key": "\u20ac"}, "/get_world_size"),
        ({"host": 3, "device": "cpu"}, "/weights/init"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise_a_weights_error(fake, options: dict[str, Any], text: str):
    refusal = {"error": {"message": "host: expected a string", "code": "invalid_request"}}

    def answer(path: str, body: Body) -> bytes:
        if path == "/get_world_size":
            return reply({"world_size": 1})
        return reply(refusal, "400 Bad Request")

    client = WeightsClient(fake(answer).url, timeout_s=TIMEOUT_S, **options)
    with pytest.raises(WeightsError, match=text):
        client.update(tensors(), policy="keep")


@pytest.mark.parametrize(
    "options", [{"chunk_bytes": -1}, {"chunk_bytes": 1.5}, {"chunk_bytes": "1"}, {"timeout_s": 0.0}]
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]):
    with pytest.raises(WeightsError, match="chunk_bytes, timeout_s: expected"):
        WeightsClient("http://127.0.0.1:1", **options)


def test_arguments_that_json_lacks_raise_a_weights_error(fake, stub_group):
    import torch

    client = client_of(fake(WholeServer()))
    wrong: Any = torch.zeros(1)
    for call in (
        lambda: client.update(tensors(), policy="keep", version=wrong),
        lambda: client.update(tensors(), policy=wrong),
        lambda: client.update_from_folder(wrong, policy="keep"),
        lambda: client.pause(wrong, lease_s=1),
        lambda: client.pause("keep", lease_s=float("nan")),
        lambda: client.pause("keep", lease_s=float("inf")),
        lambda: client.call("/resume", {"x": {1}}),
    ):
        with pytest.raises(WeightsError, match="expected arguments that JSON has"):
            call()


def test_a_close_without_a_server_drops_the_group(fake, stub_group):
    server = fake(WholeServer())
    client = client_of(server)
    client.open()
    client._url = "http://127.0.0.1:1"
    with pytest.raises(WeightsError, match=r"/weights/close: http.* no server answers"):
        client.close()
    assert not client.is_open
    client.close()


def test_an_interrupt_ends_the_group(fake, stub_group):
    """So that the workers do not wait for the rest of the update."""
    stub_group.fails, stub_group.error = "broadcast", KeyboardInterrupt()
    client = client_of(fake(WholeServer()))
    with pytest.raises(KeyboardInterrupt):
        client.update(tensors(), policy="keep")
    assert not client.is_open


def test_a_second_open_keeps_the_group(fake, stub_group):
    server = WholeServer()
    client = client_of(fake(server))
    client.open()
    client.open()
    assert server.calls.count("/weights/init") == 1


# ---- addresses -----------------------------------------------------------------------


def test_the_trainer_s_address_is_of_the_family_that_reaches_the_server(
    monkeypatch: pytest.MonkeyPatch,
):
    listening, kept = ipv6_only_listener()
    port = listening.getsockname()[1]
    assert own_address(f"http://[::1]:{port}") == "::1"
    assert own_address("http://127.0.0.1:1") == "127.0.0.1"
    found = {
        "six.test": [(socket.AF_INET6, ("::1", port, 0, 0))],
        # The server listens at only one of the two addresses.
        "both.test": [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port, 0, 0))],
    }  # fmt: skip

    def getaddrinfo(host: str, *_: Any, **options: Any) -> list[Any]:
        return [(family, options["type"], 0, "", address) for family, address in found[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert own_address(f"http://six.test:{port}") == "::1"
    assert own_address(f"http://both.test:{port}") == "::1"
    listening.close()
    kept.close()


def ipv6_only_listener() -> tuple[socket.socket, socket.socket]:
    """A socket that listens at ::1, and one that keeps other processes from listening at the same
    port of 127.0.0.1."""
    ipv6_listener().close()
    while True:
        kept = socket.socket()
        kept.bind(("127.0.0.1", 0))
        try:
            address = ("::1", kept.getsockname()[1])
            return socket.create_server(address, family=socket.AF_INET6), kept
        except OSError:
            # The port is in use there.
            kept.close()
