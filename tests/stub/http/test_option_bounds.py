"""Options that vLLM reads at each token: bounded on every route that takes them, and counted when refused."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from harness.fork_server import fork_server
from harness.servers import REPOSITORY, Server, environment, forked_server, wait_until
from harness.tool_schemas import TOOL_SCHEMAS
from titopool.settings.sampling import MAX_ENTRIES, MAX_TEXT_BYTES

MESSAGES = [{"role": "user", "content": "a"}]


def sampling(options: dict[str, Any]) -> dict[str, Any]:
    return {"sampling_params": {"max_tokens": 1, **options}}


def kwargs(options: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 1, "generation_kwargs": options}


# A body with options for each route.
ROUTES = {
    "/generate/": lambda options: {"prompts": [[1, 2]]} | kwargs(options),
    "/chat/": lambda options: {"messages": [MESSAGES]} | kwargs(options),
    "/generate": lambda options: {
        "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1, **options},
    },
    "/v1/completions": lambda options: {"prompt": [1, 2], "max_tokens": 1, **options},
    "/v1/completions/render": lambda options: {"prompt": [1, 2], "max_tokens": 1, **options},
    "/v1/chat/completions": lambda options: {"messages": MESSAGES, "max_tokens": 1, **options},
    "/v1/chat/completions/render": lambda options: {"messages": MESSAGES, **options},
    "/v1/chat/completions/tokens": lambda options: {
        "messages": MESSAGES, "tokens": [1, 2], "max_tokens": 1, **options,
    },
    "/inference/v1/generate": lambda options: {"token_ids": [1, 2]} | sampling(options),
}  # fmt: skip
# Routes whose stub has no tokenizer for what comes after the check.
NEED_TEXT = {"/chat/", "/v1/chat/completions", "/v1/chat/completions/render"}
SGLANG = ("stop", "stop_token_ids", "logit_bias")
# Options at their bounds.
LARGEST: dict[str, Any] = {
    "stop": ["s" * 50 + f"{number:010}" for number in range(MAX_ENTRIES["stop"])],
    "stop_token_ids": [*range(MAX_ENTRIES["stop_token_ids"])],
    "bad_words": [f"bad word {number:02}" for number in range(MAX_ENTRIES["bad_words"])],
    "logit_bias": {str(number): 0.5 for number in range(MAX_ENTRIES["logit_bias"])},
    "allowed_token_ids": [*range(MAX_ENTRIES["allowed_token_ids"])],
}
MORE = {
    **{name: [*value, value[-1]] for name, value in LARGEST.items() if isinstance(value, list)},
    "logit_bias": LARGEST["logit_bias"] | {"1000": 0.5},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bounds")
    endpoint = f"ipc://{folder}/worker-0"
    worker = fork_server.start(
        "harness.stub_worker", ["--endpoint", endpoint], environ=environment(HF_HUB_OFFLINE="1"),
        folder=REPOSITORY,
    )  # fmt: skip
    words = ("--endpoints", endpoint, "--num-front-ends", "1")
    try:
        with forked_server(*words, log=folder / "log", HF_HUB_OFFLINE="1") as running:
            yield running
    finally:
        worker.kill_group()


def num_refused(server: Server) -> int:
    shown = server.get("/metrics").text
    found = re.search(
        r'^titopool_refused_requests_total\{reason="invalid_request"\} (\d+)', shown, re.M
    )
    return int(found[1]) if found else 0


def test_refusals_are_counted(server: Server):
    before = num_refused(server)
    body = ROUTES["/generate/"]({"stop": [f"{number}" for number in range(10_000)]})
    assert server.post("/generate/", body | {"n": 64}).status_code == 400
    # Front ends report their counts each second.
    wait_until(lambda: num_refused(server) == before + 1, 10)


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_names_the_option_its_bound_and_what_came(server: Server, route: str):
    names = SGLANG if route == "/generate" else tuple(MORE)
    for name in names:
        answer = server.post(route, ROUTES[route]({name: MORE[name]}))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_request"), error
        most = MAX_ENTRIES[name]
        assert re.search(rf"{name}: expected at most {most} .*, got {most + 1};", error["message"])
    long = ["x" * (MAX_TEXT_BYTES["stop"] - 2), "yy"]
    answer = server.post(route, ROUTES[route]({"stop": long}))
    assert answer.status_code == 400
    assert f"stop: expected at most {MAX_TEXT_BYTES['stop']} bytes" in answer.text


@pytest.mark.parametrize("route", [route for route in ROUTES if route not in NEED_TEXT])
def test_the_largest_options_pass(server: Server, route: str):
    names = SGLANG if route == "/generate" else tuple(LARGEST)
    for name in names:
        answer = server.post(route, ROUTES[route]({name: LARGEST[name]}))
        assert answer.status_code == 200, answer.text
    if route != "/generate":
        for schema in TOOL_SCHEMAS.values():
            options = {"structured_outputs": {"json": schema}, "stop": LARGEST["stop"][:64]}
            assert server.post(route, ROUTES[route](options)).status_code == 200


def test_long_searches_for_repetitions_are_refused(server: Server):
    for detection in ({"max_pattern_size": 257}, {"max_pattern_size": 256, "min_count": 9}):
        options = {"repetition_detection": {"min_count": 2, **detection}}
        answer = server.post("/generate/", ROUTES["/generate/"](options))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "repetition_detection"
    passes = {"repetition_detection": {"max_pattern_size": 256, "min_count": 8}}
    assert server.post("/generate/", ROUTES["/generate/"](passes)).status_code == 200
