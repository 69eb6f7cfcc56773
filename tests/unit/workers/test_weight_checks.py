"""Folders outside the root and unreachable trainer addresses are refused."""

import asyncio
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from harness.servers import STALL_S, free_port
from titopool.errors import InvalidRequest
from workers.weights import checks
from workers.weights.checks import (
    check_trainer_reachable,
    checked_folder,
    is_listening,
    wait_for_unused_port,
)


@pytest.mark.parametrize(
    "name", ["loop", "in/loop", "x" * 300, "missing", "file", "\0", "..", "in/out", "in/mixed"]
)
def test_a_path_that_is_no_folder_below_the_root_is_refused(tmp_path: Path, name: str):
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "file").write_text("")
    os.symlink(root / "loop", root / "loop")
    os.symlink(root / "in" / "loop", root / "in" / "loop")
    os.symlink(tmp_path, root / "in" / "out")
    # Good files beside one that is elsewhere.
    (root / "in" / "mixed").mkdir()
    for inside in ("a", "z"):
        (root / "in" / "mixed" / inside).write_text("")
    (tmp_path / "elsewhere").write_text("")
    os.symlink(tmp_path / "elsewhere", root / "in" / "mixed" / "m")
    with pytest.raises(InvalidRequest, match="path: expected a") as caught:
        checked_folder(f"{root}/{name}", str(root))
    assert caught.value.param == "path"


def test_a_link_within_the_root_is_accepted(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("")
    os.symlink(tmp_path / "a", tmp_path / "b")
    assert checked_folder(f"{tmp_path}/b", str(tmp_path)) == os.path.realpath(tmp_path / "a")


@pytest.mark.parametrize("host", ["127.0.0.1\0", "a..b", "x" * 300, "x" * 300_000, "é" * 70, ""])
def test_a_host_that_cannot_be_resolved_is_not_listening(host: str):
    assert asyncio.run(is_listening(host, 1)) is False


def test_a_trainer_may_begin_to_listen_during_its_call(monkeypatch: pytest.MonkeyPatch):
    # Stub workers, which another test may have imported, wait less.
    monkeypatch.setattr(checks, "LISTEN_TIMEOUT_S", 5.0)
    port = free_port()
    listening: list[socket.socket] = []

    def listen_late() -> None:
        time.sleep(0.3)
        listening.append(socket.create_server(("127.0.0.1", port)))

    thread = threading.Thread(target=listen_late)
    thread.start()
    asyncio.run(check_trainer_reachable("127.0.0.1", port))
    thread.join()
    listening[0].close()


def test_a_trainer_that_does_not_listen_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "LISTEN_TIMEOUT_S", 0.1)
    with pytest.raises(InvalidRequest, match=r"nothing answers for 0\.1 s") as caught:
        asyncio.run(check_trainer_reachable("127.0.0.1", free_port()))
    assert caught.value.param == "host"


def test_a_port_that_an_outgoing_connection_holds_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:
        outgoing = socket.create_connection(server.getsockname())
        # A reset, as it frees the port at once: after a usual end Linux keeps it for a minute.
        outgoing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        threading.Timer(0.5, outgoing.close).start()
        began = time.monotonic()
        asyncio.run(wait_for_unused_port("127.0.0.1", outgoing.getsockname()[1]))
        assert 0.4 < time.monotonic() - began < 30 + STALL_S


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_a_port_that_cannot_become_free_is_not_waited_for(host: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        asyncio.run(wait_for_unused_port(host, server.getsockname()[1]))
        assert time.monotonic() - began < 30 + STALL_S
