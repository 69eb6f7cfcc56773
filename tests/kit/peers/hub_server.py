"""A stand-in of the Hugging Face Hub: what huggingface_hub asks for when it downloads a model.

Model information, the tree of files, and files with ETag, X-Repo-Commit, Content-Length and ranges.
It can be slow, break connections, refuse tokens and be unknown.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

COMMIT = "c" * 40
PIECE = 2**16


class Hub:
    """One running stand-in with one model."""

    def __init__(self, model: str, folder: Path):
        self.model = model
        self.files = {one.name: one for one in folder.iterdir() if one.is_file()}
        # Sizes that the hub announces in place of the true ones.
        self.announced: dict[str, int] = {}
        # Of each connection that sends a file; None: no limit.
        self.bytes_per_s: float | None = None
        # Connections to break off in the middle of a file.
        self.num_breaks = 0
        # Sent for the model: 401 or 403, with the hub's code of an error.
        self.refusal: tuple[int, str] | None = None
        # GETs of files by name, and the first bytes that ranges asked for.
        self.downloads: Counter[str] = Counter()
        self.resumed_at: list[int] = []
        self.url = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables of a process that downloads from here into `cache`."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(cache / "hub"), "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

    def size_of(self, name: str) -> int:
        return self.announced.get(name, self.files[name].stat().st_size)

    def etag_of(self, name: str) -> str:
        return hashlib.sha1(self.files[name].read_bytes()).hexdigest()


@contextmanager
def running_hub(model: str, folder: Path) -> Iterator[Hub]:
    """A hub that has `model`, with the files of `folder`."""
    hub = Hub(model, folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            path = parts.path.strip("/")
            if path == "api/models":
                self._send_list(parse_qs(parts.query))
            elif path.startswith(f"api/models/{hub.model}") and not hub.refusal:
                self._send_facts(path.removeprefix(f"api/models/{hub.model}").strip("/"))
            elif path.startswith(f"{hub.model}/resolve/") and not hub.refusal:
                self._send_file(path.rpartition("/")[2])
            else:
                status, code = hub.refusal or (404, "RepoNotFound")
                self._send_json({"error": code}, status, {"X-Error-Code": code})

        def _send_list(self, query: dict[str, list[str]]) -> None:
            owner = hub.model.partition("/")[0]
            is_found = query.get("author") == [owner] or query.get("search", [""])[0] in hub.model
            self._send_json([{"id": hub.model, "modelId": hub.model}] if is_found else [])

        def _send_facts(self, rest: str) -> None:
            names = sorted(hub.files)
            if rest.startswith("tree/"):
                entries = [
                    {"type": "file", "path": one, "size": hub.size_of(one), "oid": hub.etag_of(one)}
                    for one in names
                ]
                self._send_json(entries)
                return
            siblings = [
                {"rfilename": one, "size": hub.size_of(one), "blobId": hub.etag_of(one)}
                for one in names
            ]
            self._send_json(
                {"id": hub.model, "modelId": hub.model, "sha": COMMIT, "siblings": siblings,
                 "private": False, "tags": [], "downloads": 0, "likes": 0}
            )  # fmt: skip

        def _send_json(
            self, body: Any, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Type": "application/json"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def _send_file(self, name: str) -> None:
            if name not in hub.files:
                self._send_json({}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            data = hub.files[name].read_bytes()
            asked = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            begin = int(asked[0] or 0)
            end = int(asked[2] or len(data) - 1)
            self.send_response(206 if asked[1] else 200)
            self.send_header("ETag", f'"{hub.etag_of(name)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Type", "application/octet-stream")
            if asked[1]:
                self.send_header("Content-Range", f"bytes {begin}-{end}/{len(data)}")
            self.send_header("Content-Length", str(end + 1 - begin))
            self.end_headers()
            if self.command == "GET":
                hub.downloads[name] += 1
                if begin:
                    hub.resumed_at.append(begin)
                self._send_pieces(data[begin : end + 1])

        def _send_pieces(self, data: bytes) -> None:
            breaks = len(data) > 4 * PIECE and hub.num_breaks > 0
            hub.num_breaks -= breaks
            for start in range(0, len(data), PIECE):
                if breaks and start >= len(data) // 2:
                    self.close_connection = True
                    self.connection.close()
                    return
                piece = data[start : start + PIECE]
                self.wfile.write(piece)
                if hub.bytes_per_s:
                    time.sleep(len(piece) / hub.bytes_per_s)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
