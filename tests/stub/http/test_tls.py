"""HTTPS with a certificate that the test makes, in front of a stub worker."""

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import requests

from harness.servers import REPOSITORY, Server, environment, wait_until
from harness.stub_worker import Fault
from tests.conftest import StartStub


def make_certificate(folder: Path) -> None:
    """Replaces `cert.pem` and `key.pem` of `folder`."""
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout {folder}/key.pem "
        f"-out {folder}/cert.pem"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=30)


@pytest.fixture
def server(
    start_stub: StartStub,
    start_forked: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Server:
    make_certificate(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "cert.pem"))
    start_stub(0, "--max-num-seqs", "1")
    server = start_forked(
        "--endpoints", f"ipc://{tmp_path}/worker-0", "--num-front-ends", "1",
        "--tls-cert-file", str(tmp_path / "cert.pem"), "--tls-key-file", str(tmp_path / "key.pem"),
    )  # fmt: skip
    server.url = server.url.replace("http://", "https://")
    server.wait_until_ready()
    return server


def test_https(server: Server, tmp_path: Path):
    port = int(server.url.rpartition(":")[2])
    assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]
    assert server.get("/ready").json()["num_ready"] == 1
    # Who does not speak TLS, or breaks off, harms nobody and leaves no traceback.
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/live", timeout=10)
    socket.create_connection(("127.0.0.1", port)).close()

    trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    body = f'{{"prompts": [[{int(Fault.HANG)}]]}}'
    head = f"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    for says_goodbye in (True, False):
        raw = socket.create_connection(("127.0.0.1", port), timeout=10)
        client = trusting.wrap_socket(raw, server_hostname="127.0.0.1")
        client.sendall((head + body).encode())
        wait_until(lambda: sum(server.metrics("sequences").values()) == 1, 20)
        if says_goodbye:
            client.settimeout(0.2)
            # Sends close_notify, which leaves the server's socket readable.
            with contextlib.suppress(OSError):
                client.unwrap()
        client.close()
        raw.close()
        # The only slot is free again.
        assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]

    before = ssl.get_server_certificate(("127.0.0.1", port))
    make_certificate(tmp_path)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
        # A later connection is served, so the front end has accepted this one.
        assert ssl.get_server_certificate(("127.0.0.1", port)) == before
        [front_end] = psutil.Process(server.process.pid).children()
        server.process.send_signal(signal.SIGHUP)
        # Until the old front end has closed its listener, it may serve a new connection.
        wait_until(lambda: "LISTEN" not in {one.status for one in front_end.net_connections()}, 20)
        with trusting.wrap_socket(slow, server_hostname="127.0.0.1") as client:
            client.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    assert ssl.get_server_certificate(("127.0.0.1", port)) != before
    assert server.generate([[1, 2]])["completion_ids"] == [[2, 1]]
    assert "Traceback" not in server.log


def test_a_client_that_does_not_shake_hands_is_disconnected(tmp_path: Path):
    make_certificate(tmp_path)
    code = f"""
from gevent import monkey
monkey.patch_all()
import socket, ssl
from types import SimpleNamespace
from app.http.tls import ssl_context

def make():
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain({str(tmp_path / "cert.pem")!r}, {str(tmp_path / "key.pem")!r})
    return context

client, served = socket.socketpair()
connection = ssl_context(SimpleNamespace(keepalive=0.1), make).wrap_socket(served, server_side=True)
try:
    connection.do_handshake()
except ssl.SSLError as error:
    print(error.args[0] == ssl.SSL_ERROR_EOF)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("True\n", "")
