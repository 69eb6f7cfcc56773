"""CPU time of a request in gunicorn's kinds of workers, with a Flask app that does nothing.

    python -m benchmarks.gunicorn_workers [--repeats 3]

The app reads a body of 256 ids and answers as many bytes as `/generate/` does for 256 tokens. 16
clients keep their connections. So the figures are what HTTP costs this server with each kind.
"""

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from flask import Flask, Response, request

from harness.servers import environment, free_port, wait_until

KINDS = {
    "gevent": ["-k", "gevent"],
    "gevent, parser in Python": ["-k", "gevent", "--http-parser", "python"],
    "gevent_pywsgi": ["-k", "gevent_pywsgi"],
    "gthread": ["-k", "gthread", "--threads", "16"],
    "this server's": ["-k", "app.gunicorn_worker.FrontEnd"],
}
NUM_CLIENTS, NUM_CALLS = 16, 250
BODY = json.dumps({"prompts": [list(range(10_000, 10_256))]}).encode()
ANSWER = b"x" * 6_000


def create_app() -> Flask:
    """The app that each kind serves."""
    app = Flask(__name__)

    @app.post("/")
    def answer() -> Response:
        request.get_data()
        return Response(ANSWER, mimetype="application/json")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    for _ in range(parser.parse_args().repeats):
        for kind, words in KINDS.items():
            print(f"{kind}: {measure(words):.0f} µs a request", flush=True)


def measure(words: list[str]) -> float:
    """µs of CPU a request, after as many requests that warm up."""
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "benchmarks.gunicorn_workers:create_app()"]
    command += ["--bind", f"127.0.0.1:{port}", "--keep-alive", "60", *words]
    # In this folder gunicorn does not find the server's gunicorn.conf.py.
    with tempfile.TemporaryDirectory() as name, Path(name, "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment(), cwd=name, stdout=log, stderr=log)
        try:
            wait_until(lambda: is_listening(port), 30)
            (worker,) = psutil.Process(server.pid).children()
            send_all(port)
            before = worker.cpu_times()
            send_all(port)
            after = worker.cpu_times()
        finally:
            server.terminate()
            server.wait(30)
    used_s = after.user + after.system - before.user - before.system
    return 1e6 * used_s / (NUM_CLIENTS * NUM_CALLS)


def is_listening(port: int) -> bool:
    try:
        send(port, 1)
    except OSError:
        return False
    return True


def send_all(port: int) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(lambda _: send(port, NUM_CALLS), range(NUM_CLIENTS)))


def send(port: int, num_calls: int) -> None:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(num_calls):
        client.request("POST", "/", BODY, {"Content-Type": "application/json"})
        answer = client.getresponse()
        if len(answer.read()) != len(ANSWER):
            raise SystemExit(f"expected {len(ANSWER)} bytes, got status {answer.status}")
    client.close()


if __name__ == "__main__":
    main()
