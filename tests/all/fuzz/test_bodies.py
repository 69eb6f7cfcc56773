"""Any HTTP body: a response in time, never a 500, and an unchanged server."""

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings

from tests.all.fuzz.bodies import requests
from tests.all.fuzz.exploring import TIMEOUT_S, explore
from tests.all.fuzz.fuzzed_server import Fuzzed, fuzzed_server
from tests.all.fuzz.hints import ADAPTER
from tests.all.fuzz.oracle import check_answer, path_of
from tests.all.fuzz.wire_http import Sent

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(scope="module")
def fuzzed(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    root, log = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("fuzzed") / "log"
    with fuzzed_server(tiny_model, root, log) as found:
        yield found


def undo(fuzzed: Fuzzed, sent: Sent) -> None:
    """Undoes what a successful request has changed."""
    path = path_of(sent).strip("/")
    if path in ("pause", "pause_generation"):
        fuzzed.server.post("/resume", None)
    elif path == "v1/load_lora_adapter":
        name = sent.json()["lora_name"]
        if name != ADAPTER:
            fuzzed.server.post("/v1/unload_lora_adapter", {"lora_name": name})


def test_any_body_gets_a_valid_response(fuzzed: Fuzzed) -> None:
    @settings(max_examples=200)
    @given(sent=requests)
    @example(sent=Sent("POST", "/generate/", b'{"prompts": [[1]], "max_tokens": 1}'))
    def check_response(sent: Sent) -> None:
        answer = fuzzed.ask(sent)
        if answer is None:
            assert not sent.is_whole, "no answer to a whole request"
            return
        # An OPTIONS of the same path changes nothing.
        if sent.method == "POST" and answer.status == 200:
            undo(fuzzed, sent)
        check_answer(sent, answer)

    explore(check_response, check_response, name="bodies", share=0.5, between=fuzzed.check)
    print(f"{fuzzed.num_sent} requests; by status: {dict(sorted(fuzzed.statuses.items()))}")
