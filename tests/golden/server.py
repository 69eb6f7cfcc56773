"""The server of the golden requests: two front ends before a stub worker that never waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.servers import Server, forked_server, stub_worker, wait_until
from tests.golden.exchanges import (
    ADMIN,
    MAX_BODY_BYTES,
    MAX_OPEN_REQUESTS,
    MAX_SESSIONS,
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
        yield server.url


def _reads_text(server: Server) -> bool:
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    answers = [server.post("/tokenize", body, headers=AS_USER) for body in ({"prompt": TEXT}, chat)]
    return all(one.status_code == 200 for one in answers)
