"""The server of the golden requests: two front ends before a stub worker that never waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from harness.servers import Server, forked_server, stub_worker, wait_until
from tests.golden.exchanges import (
    ADMIN,
    FIRST_TURN,
    MAX_BODY_BYTES,
    MAX_OPEN_REQUESTS,
    MAX_SESSIONS,
    SECOND_TURN,
    TEXT,
    USER,
)
from tests.kit.models.adapters import make_adapter

AS_USER = {"Authorization": f"Bearer {USER}"}


@contextmanager
def golden_server(model: str, root: Path) -> Iterator[str]:
    """Its URL. `root` gets an adapter; weights may come from any folder."""
    make_adapter(model, root, "math-1", 1)
    endpoint = f"ipc://{root}/worker-0"
    settings = {"TITOPOOL_WEIGHTS_ROOT": "/", "TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S": "20"}
    words = ("--worker-id", "0", "--model", "tiny", "--tokenizer", model, "--max-model-len", "512")
    with stub_worker(endpoint, *words, **settings), forked_server(
        "--endpoints", endpoint, "--num-front-ends", "2", "--request-timeout-s", "2",
        "--client-timeout-s", "1", "--max-open-requests", str(MAX_OPEN_REQUESTS), "--max-body-bytes", str(MAX_BODY_BYTES), "--memory-budget-bytes", str(2**27), "--max-sessions", str(MAX_SESSIONS), log=root / "log",
        TITOPOOL_API_KEY=USER, TITOPOOL_ADMIN_KEY=ADMIN, **settings,
    ) as server:  # fmt: skip
        # Each front end loads its tokenizer with its first text, and compiles the chat template.
        wait_until(lambda: all(_reads_text(server) for _ in range(8)), 60)
        # It learns with its first turn that goes on how turns of this model are continued.
        session = server.post("/sessions", None, headers=AS_USER).json()
        own = {"Authorization": f"Bearer {session['key']}"}
        server.post("/v1/chat/completions", FIRST_TURN, headers=own)
        wait_until(lambda: all(_goes_on(server, own) for _ in range(8)), 60)
        requests.delete(
            f"{server.url}/sessions/{session['session_id']}", headers=AS_USER, timeout=30
        )
        yield server.url


def _reads_text(server: Server) -> bool:
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    answers = [server.post("/tokenize", body, headers=AS_USER) for body in ({"prompt": TEXT}, chat)]
    return all(one.status_code == 200 for one in answers)


def _goes_on(server: Server, key: dict[str, str]) -> bool:
    # Runs no job, so that workers have counted one in any case.
    asked = {"messages": SECOND_TURN["messages"]}
    return server.post("/v1/messages/count_tokens", asked, headers=key).status_code == 200
