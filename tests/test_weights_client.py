"""The trainer's client when the server, or a proxy before it, does not respond correctly."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest

from tests.servers import wait_until
from titopool.client.server_calls import own_address
from titopool.client.trainer_group import GLOO_PREFIX, rank_key
from titopool.client.weights_client import WeightsClient, WeightsError

# The client's timeout; a test that runs into it has failed.
TIMEOUT_S = 60.0
SOON_S = 20.0

Body = dict[str, Any]
# Maps a path and a body to the bytes of the response.
Answer = Callable[[str, Body], bytes]


def reply(body: Any, status: str = "200 OK", length: int | None = None) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(raw) if length is None else length}\r\n\r\n"
    return head.encode() + raw


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


class FakeServer:
    """Answers each connection once with the given bytes, then hangs up."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            asked = lines.readline()
            if not asked:
                # The client connects once to find its own address.
                return
            length = 0
            while (line := lines.readline().strip().lower()) != b"":
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            body = json.loads(lines.read(length) or b"{}")
            connection.sendall(self._answer(asked.split()[1].decode(), body))

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def fake() -> Iterator[Callable[[Answer], FakeServer]]:
    started: list[FakeServer] = []

    def start(answer: Answer) -> FakeServer:
        started.append(FakeServer(answer))
        return started[-1]

    yield start
    for server in started:
        server.close()


def client_of(server: FakeServer) -> WeightsClient:
    return WeightsClient(server.url, device="cpu", timeout_s=TIMEOUT_S)


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
    store = TCPStore(body["host"], body["port"], None, False, timeout=limit, wait_for_workers=False)
    store.set(rank_key(1), b"1")
    store.wait([rank_key(0)])
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


def test_a_group_that_lost_a_member_is_replaced_at_the_next_update(
    fake, monkeypatch: pytest.MonkeyPatch
):
    import torch

    class Group:
        backend, port, device_uuid = "gloo", 1, ""

        def __init__(self, *_: Any, **__: Any):
            pass

        def form(self, **_: Any) -> None:
            pass

        def broadcast(self, buffer: Any, check_workers: Any) -> Callable[[], None]:
            return lambda: None

        def abort(self) -> None:
            pass

    calls: list[str] = []
    lost = [{"endpoint": "ipc:///w1", "error": "killed"}]

    def answer(path: str, body: Body) -> bytes:
        calls.append(path)
        is_first = calls.count("/weights/commit") == 1
        return reply(
            {
                "/get_world_size": {"world_size": 2},
                "/weights/begin": {"update": "u", "missing": [], "ignored": [], "kept": []},
                "/weights/commit": {"version": 1, "lost": lost if is_first else []},
            }.get(path, {})
        )

    monkeypatch.setattr("titopool.client.weights_client.TrainerGroup", Group)
    client = client_of(fake(answer))
    assert client.update([("w", torch.zeros(2))], policy="keep")["lost"] == lost
    assert not client.is_open
    assert client.update([("w", torch.zeros(2))], policy="keep")["lost"] == []
    assert client.is_open
    assert [one for one in calls if one in ("/weights/init", "/weights/close")] == [
        "/weights/init", "/weights/close", "/weights/init",
    ]  # fmt: skip


# ---- addresses -----------------------------------------------------------------------


def test_the_trainer_s_address_is_of_the_family_that_reaches_the_server(
    monkeypatch: pytest.MonkeyPatch,
):
    listening = ipv6_listener()
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


def ipv6_listener() -> socket.socket:
    """A socket that listens at ::1; skips the test where IPv6 is missing."""
    try:
        return socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
