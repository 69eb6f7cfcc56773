"""Fuzzed HTTP requests: valid and mutated bodies of each route, other bytes, broken framing."""

import functools
import gzip
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from app import create_app
from app.anthropic import bodies as anthropic
from app.openai import bodies as openai_bodies
from app.responses import bodies as responses
from app.route.unused_fields import CHAT_ONLY, UNUSED, UNUSED_OF_GENERATE, UNUSED_SAMPLING, Unused
from app.sessions import bodies as sessions
from app.sglang import bodies as sglang
from app.sglang import sglang_unused_fields as sglang_fields
from app.trl import bodies as schemas
from app.vllm import bodies as inference
from app.vllm_rl import bodies as vllm_rl
from app.weights import bodies as weight_bodies
from tests.all.fuzz.hints import (
    ADAPTER_HINTS,
    ALONE_HINTS,
    HINTS,
    INIT_INFOS,
    MESSAGES_HINTS,
    RESPONSES_HINTS,
    ROOT,
    SAMPLING_HINTS,
    SGLANG_HINTS,
    UPDATE_INFOS,
    kind_of,
    messages,
    words,
)
from tests.all.fuzz.values import Strategy, dump, mutated, objects_of, small_json
from tests.all.fuzz.wire_http import Sent
from titopool.settings.config import ServerConfig
from titopool.settings.sampling import SamplingOptions


class Route(NamedTuple):
    """A route that takes a body."""

    path: str
    # Bodies that follow the route's schema.
    bodies: Strategy
    # Names of top-level fields.
    fields: frozenset[str]


def _route(
    path: str,
    struct: type[msgspec.Struct],
    hints: dict[str, Strategy] = HINTS,
    *,
    adjust: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Route:
    """A route with bodies of `struct`; `adjust` makes dependent fields consistent."""
    bodies = objects_of(kind_of(struct), hints).map(adjust)
    return Route(path, bodies, frozenset(struct.__struct_fields__))


def _with_lengths(body: dict[str, Any]) -> dict[str, Any]:
    lengths = (body["prompt_lengths"] * len(body["sequences"]))[: len(body["sequences"])]
    return {**body, "prompt_lengths": lengths}


def _with_one_source(body: dict[str, Any]) -> dict[str, Any]:
    if (body.get("prompt") is None) == (body.get("messages") is None):
        return {key: one for key, one in {**body, "prompt": "a b"}.items() if key != "messages"}
    return body


def _with_folder(body: dict[str, Any]) -> dict[str, Any]:
    return {"path": f"{ROOT}/weights", "policy": "keep", **body}


def _with_equal_lists(body: dict[str, Any]) -> dict[str, Any]:
    num = len(body["names"])
    cut = {key: (body[key] * num)[:num] for key in ("dtypes", "shapes")}
    return {**body, **cut}


def _maybe_unused(draw: Callable[[Strategy], Any], unused: dict[str, Unused]) -> dict[str, Any]:
    """Rarely, one of the fields that have no effect."""
    if draw(st.integers(0, 9)):
        return {}
    name = draw(st.sampled_from(sorted(unused)))
    accepted = unused[name].accepted or (None,)
    return {name: draw(st.one_of(st.sampled_from(accepted), small_json))}


@st.composite
def _openai_body(
    draw: Callable[[Strategy], Any],
    struct: type[msgspec.Struct],
    hints: dict[str, Strategy],
    always: tuple[str, ...],
) -> Any:
    body = draw(objects_of(kind_of(struct), hints))
    if draw(st.booleans()):
        body = {**draw(objects_of(kind_of(SamplingOptions), SAMPLING_HINTS)), **body}
    body |= _maybe_unused(draw, {**UNUSED, **dict.fromkeys(CHAT_ONLY, Unused(""))})
    return body | {name: draw(hints[name]) for name in always if name not in body}


def _openai_route(
    path: str, struct: type[msgspec.Struct], *always: str, **hints: Strategy
) -> Route:
    """A route of OpenAI's API; every body has the fields in `always`."""
    fields = {*struct.__struct_fields__, *SamplingOptions.__struct_fields__, *UNUSED, *CHAT_ONLY}
    bodies = _openai_body(struct, {**HINTS, **hints}, ("max_tokens", *always))
    return Route(path, bodies, frozenset(fields))


@st.composite
def _open_body(
    draw: Callable[[Strategy], Any],
    struct: type[msgspec.Struct],
    hints: dict[str, Strategy],
    unused: dict[str, Unused],
    least: dict[str, Any],
) -> Any:
    body = least | draw(objects_of(kind_of(struct), {**HINTS, **hints}))
    if draw(st.booleans()):
        options = draw(objects_of(kind_of(SamplingOptions), SAMPLING_HINTS))
        body = {name: one for name, one in options.items() if name not in unused} | body
    return body | _maybe_unused(draw, unused)


def _open_route(
    path: str,
    struct: type[msgspec.Struct],
    hints: dict[str, Strategy],
    unused: dict[str, Unused],
    **least: Any,
) -> Route:
    """A route whose body may have unknown fields; one without those in `least` gets them."""
    fields = {*struct.__struct_fields__, *SamplingOptions.__struct_fields__, *unused}
    return Route(path, _open_body(struct, hints, unused, least), frozenset(fields))


@st.composite
def _generate_body(draw: Callable[[Strategy], Any]) -> Any:
    body = draw(objects_of(kind_of(inference.GenerateFields), HINTS))
    options = {"max_tokens": 2, **body["sampling_params"], **_maybe_unused(draw, UNUSED_SAMPLING)}
    return {**body, "sampling_params": options, **_maybe_unused(draw, UNUSED_OF_GENERATE)}


@st.composite
def _sglang_body(draw: Callable[[Strategy], Any]) -> Any:
    """A body of one prompt, or of two with a value for both or one for each."""
    of_prompt = objects_of(kind_of(sglang.PromptFields), SGLANG_HINTS)
    bodies = [draw(of_prompt) for _ in range(draw(st.integers(1, 2)))]
    body = bodies[0]
    source = draw(st.sampled_from(sglang.SOURCES))
    prompts = [draw(SGLANG_HINTS[source]) for _ in bodies]
    if len(bodies) > 1:
        both = {name: [one.get(name) for one in bodies] for name in {*bodies[0], *bodies[1]}}
        body = {name: one[0] if draw(st.booleans()) else one for name, one in both.items()}
    body = {name: one for name, one in body.items() if name not in sglang.SOURCES}
    body[source] = prompts if len(prompts) > 1 else prompts[0]
    of_all = draw(objects_of(kind_of(sglang.RequestFields), HINTS))
    return of_all | body | _maybe_unused(draw, sglang_fields.UNUSED)


GENERATING = (
    Route(
        "/generate/",
        st.one_of(objects_of(kind_of(schemas.GenerateBody), HINTS), _sglang_body()),
        frozenset((*schemas.GenerateBody.__struct_fields__, *sglang.RequestFields.__struct_fields__,
                   *sglang.PromptFields.__struct_fields__, *sglang_fields.UNUSED)),
    ),
    _route("/chat/", schemas.ChatBody, {**HINTS, "messages": st.lists(messages, min_size=1, max_size=2)}),
    _route("/get_sequence_logprobs/", schemas.SequencesBody, adjust=_with_lengths),
    _route("/tokenize/", inference.TokenizeBody, {**HINTS, "prompt": st.one_of(st.none(), words), "messages": st.one_of(st.none(), messages)}),
    _route("/detokenize/", inference.DetokenizeBody),
    _route("/mismatch/", schemas.MismatchBody, {**HINTS, "request_id": words, "logprobs": st.lists(st.lists(st.floats(-9, 1), max_size=3), max_size=3)}),
    _openai_route("/v1/completions/", openai_bodies.CompletionsFields),
    _openai_route("/v1/chat/completions/", openai_bodies.ChatFields, tokens=st.none(), logprobs=st.booleans()),
    _openai_route("/v1/chat/completions/tokens/", openai_bodies.ChatFields, "tokens", logprobs=st.booleans()),
    _open_route("/v1/responses/", responses.ResponsesFields, RESPONSES_HINTS, responses.RESPONSES_BODY.unused, max_output_tokens=2),
    _open_route("/v1/messages/", anthropic.MessagesFields, MESSAGES_HINTS, anthropic.MESSAGES_BODY.unused),
    _open_route("/v1/messages/count_tokens/", anthropic.ConversationFields, MESSAGES_HINTS, anthropic.COUNT_BODY.unused),
    Route("/inference/v1/generate/", _generate_body(), frozenset((*inference.GenerateFields.__struct_fields__, *UNUSED_OF_GENERATE))),
    _route("/sessions/", sessions.SessionBody),
    _route("/sessions/<session_id>/samples/", sessions.SamplesBody),
    _openai_route("/v1/completions/render/", openai_bodies.CompletionsFields),
    _openai_route("/v1/chat/completions/render/", openai_bodies.ChatFields, tokens=st.none(), logprobs=st.booleans()),
)  # fmt: skip
ADMINISTRATIVE = (
    _route("/v1/load_lora_adapter/", weight_bodies.LoadAdapterBody, ADAPTER_HINTS),
    _route("/v1/unload_lora_adapter/", weight_bodies.UnloadAdapterBody, ADAPTER_HINTS),
    _route("/weights/init/", weight_bodies.InitBody),
    _route("/weights/begin/", weight_bodies.BeginBody, adjust=_with_equal_lists),
    _route("/weights/commit/", weight_bodies.CommitBody),
    _route("/weights/abort/", weight_bodies.WeightsAbortBody),
    _route("/weights/close/", weight_bodies.CloseBody),
    _route("/weights/accept/", weight_bodies.AcceptBody),
    Route(
        "/update_weights/",
        st.one_of(
            objects_of(kind_of(vllm_rl.FolderBody), HINTS).map(_with_folder),
            st.fixed_dictionaries({"update_info": UPDATE_INFOS}),
        ),
        frozenset((*vllm_rl.FolderBody.__struct_fields__, "update_info")),
    ),
    Route("/init_weight_transfer_engine/", st.fixed_dictionaries({"init_info": INIT_INFOS}), frozenset(("init_info",))),
    _route("/finish_weight_update/", vllm_rl.FinishBody),
    _route("/update_weight_version/", vllm_rl.VersionBody),
    _route("/weight_checker/", vllm_rl.CheckerBody),
    _route("/abort_requests/", vllm_rl.AbortRequestsBody),
    _route("/inference/v1/abort_requests/", inference.InferenceAbortBody),
    _route("/pause_generation/", sglang.PauseGenerationBody, {**HINTS, "mode": st.sampled_from(("abort", "retract", "in_place"))}),
    _route("/continue_generation/", sglang.ContinueGenerationBody),
    _route("/update_weights_from_disk/", sglang.DiskBody, {**HINTS, "model_path": HINTS["path"].map(lambda one: one or "")}),
    _route("/abort_request/", sglang.SglangAbortBody),
    _route("/load_lora_adapter/", weight_bodies.LoadAdapterBody, ADAPTER_HINTS),
    _route("/unload_lora_adapter/", weight_bodies.UnloadAdapterBody, ADAPTER_HINTS),
    _route("/pause/", weight_bodies.PauseBody),
    _route("/init_communicator/", weight_bodies.TrlInitBody, ALONE_HINTS),
    _route("/update_named_param/", weight_bodies.TrlTensorBody),
    # These routes take no body.
    *(
        Route(f"/{name}/", small_json, frozenset())
        for name in (
            "start_weight_update", "shutdown_weight_transfer_engine", "start_draft_weight_update",
            "reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up", "collective_rpc",
            "init_weights_update_group", "update_weights_from_distributed",
            "update_weights_from_tensor", "release_memory_occupation", "resume_memory_occupation",
            "flush_cache",
        )
    ),
    # No body that scales the pool, and no worker of this name.
    Route("/workers/scale/", small_json, frozenset({"num_workers"})),
    Route("/workers/<name>/drain/", small_json, frozenset()),
    Route("/workers/connections/", small_json, frozenset()),
    Route("/resume/", small_json, frozenset()),
    Route("/reset_prefix_cache/", small_json, frozenset()),
    Route("/close_communicator/", small_json, frozenset()),
)  # fmt: skip
BY_PATH = {route.path: route for route in (*GENERATING, *ADMINISTRATIVE)}


@functools.cache
def rules() -> dict[str, set[str]]:
    """Every path of the server, with its methods."""
    return {
        rule.rule: set(rule.methods or ())
        for rule in create_app(ServerConfig()).url_map.iter_rules()
    }


# ---- requests --------------------------------------------------------------------------

JSON_HEADER = ("Content-Type", "application/json")
_headers = st.one_of(
    *[st.just((JSON_HEADER,))] * 4,
    st.sampled_from((
        (), (("Content-Type", "text/plain"),), (("Content-Type", "application/x-www-form-urlencoded"),),
        (("Content-Type", "multipart/form-data; boundary=x"),), (("Content-Type", "multipart/form-data"),),
        (("Content-Type", "application/json; charset=utf-16"),), (("Content-Type", "application/msgpack"),),
        (("Content-Type", "\xff/;;=="),), (JSON_HEADER, ("Content-Encoding", "gzip")),
        (JSON_HEADER, ("Accept", "application/msgpack")), (JSON_HEADER, ("Accept", "application/x-msgpack;q=0.9, */*;q=1e5")),
        (JSON_HEADER, ("Accept", "\xe9;q=x,,;=")), (JSON_HEADER, ("Authorization", "Bearer \xff")),
        (JSON_HEADER, ("Accept-Encoding", "gzip, br;q=nan")), (JSON_HEADER, ("Expect", "100-continue")),
        (JSON_HEADER, ("X-Forwarded-For", "x"), ("Forwarded", "for=;;")), (JSON_HEADER, ("Range", "bytes=5-1")),
        (JSON_HEADER, ("Cookie", "a=\xff; ; =")), (JSON_HEADER, ("X-HTTP-Method-Override", "DELETE")),
        (JSON_HEADER, ("X-Request-Id", "a"), ("X-Session-ID", "s" * 300)), (JSON_HEADER, ("X-Request-Id", "\xff;\t")),
    )),
)  # fmt: skip


@st.composite
def _bytes_of(draw: Callable[[Strategy], Any], text: bytes) -> bytes:
    """The text, or bytes that differ slightly from it."""
    mutation = draw(st.sampled_from((*[-1] * 25, *range(9))))
    if mutation == 0:
        return text[: draw(st.integers(0, len(text)))]
    if mutation == 1:
        position = draw(st.integers(0, max(0, len(text) - 1)))
        return text[:position] + bytes((draw(st.integers(0, 255)),)) + text[position + 1 :]
    mutations: dict[int, Callable[[], bytes]] = {
        2: lambda: text + draw(st.sampled_from((b" ", b"\n\0", b"{}", b",", b"\xef\xbb\xbf"))),
        3: lambda: text.decode().encode(draw(st.sampled_from(("utf-16", "utf-32", "utf-8-sig", "utf-7")))),
        4: lambda: gzip.compress(text, mtime=0),
        5: lambda: draw(st.binary(max_size=20)),
        6: lambda: text.replace(b'"', b"'"),
        7: lambda: text.decode().replace(":", ":\xa0", 1).encode("latin-1", "replace"),
        8: lambda: b"",
    }  # fmt: skip
    return mutations[mutation]() if mutation in mutations else text


@st.composite
def body_requests(draw: Callable[[Strategy], Any]) -> Sent:
    """A POST request with a body, for a route that takes one."""
    routes = draw(st.sampled_from((GENERATING, GENERATING, ADMINISTRATIVE)))
    route = draw(st.sampled_from(routes))
    value = draw(route.bodies)
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 1, 2)))):
        value = draw(mutated(value))
    headers = draw(_headers)
    chunks = None
    if not draw(st.integers(0, 9)):
        chunks = tuple(draw(st.lists(st.integers(1, 50), max_size=4)))
    path = route.path if draw(st.booleans()) else route.path.rstrip("/")
    return Sent("POST", path, draw(_bytes_of(dump(value))), headers, chunks)


_queries = st.sampled_from(("", "?", "?a", "?a=1&a=2", "?%", "?%ff=%00", "?" + "a" * 3000, "?;#"))
_odd_paths = st.sampled_from(
    ("/", "//", "/nowhere", "/%00", "/%ff", "/generate/x", "//generate//", "/generate/../live", "/GENERATE/",
     "/generate%2f", "/./live", "/\xff", "*", "/" + "a" * 3000, "/static/x", "http://x/live", "/live;a=1")
)  # fmt: skip
_methods = st.sampled_from(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "X-A"))  # fmt: skip


@st.composite
def other_requests(draw: Callable[[Strategy], Any]) -> Sent:
    """Any method on any path, with odd queries and without a fitting body."""
    paths = st.sampled_from(sorted(rules()))
    path = draw(st.one_of(paths, paths.map(lambda one: one.rstrip("/") or "/"), _odd_paths))
    body = draw(st.sampled_from((b"", b"", b"{}", b"null", b"x")))
    return Sent(draw(_methods), path + draw(_queries), body, draw(_headers))


# Chunked bodies with broken framing; none is complete.
_broken_chunks = st.sampled_from(
    (b"x\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n0\r\n\r\n", b"5\r\n{}\r\n0\r\n\r\n", b"2\r\n{}x\r\n0\r\n\r\n",
     b"2{}\r\n0\r\n\r\n", b"\r\n\r\n", b"2\r\n{}\r\n", b"2\n{}\n0\n\n", b"ffffffffffffffffff\r\n{}", b"0x2\r\n{}\r\n0\r\n\r\n",
     b" 2\r\n{}\r\n0\r\n\r\n", b"2 \r\n{}\r\n0\r\n\r\n", b"2;\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\nA: \0\r\n\r\n", b"2\r\n{}\r\n0\r\nnonsense\r\n\r\n",
     b"+2\r\n{}\r\n0\r\n\r\n", b"2_0\r\n{}\r\n0\r\n\r\n", b"", b"0", b"99999\r\n{}")
)  # fmt: skip
_odd_framings = st.sampled_from(
    ((("Content-Length", "abc"),), (("Content-Length", "-1"),), (("Content-Length", "1"), ("Content-Length", "2")),
     (("Content-Length", "99"),), (("Content-Length", "+2"),), (("Content-Length", "2, 2"),), (("Content-Length", "9" * 30),),
     (("Transfer-Encoding", "gzip"),), (("Transfer-Encoding", "chunked"), ("Content-Length", "2")),
     (("Transfer-Encoding", "chunked, chunked"),), (("Transfer-Encoding", "identity"),), (("Transfer-Encoding", "\x0bchunked"),))
)  # fmt: skip


@st.composite
def broken_requests(draw: Callable[[Strategy], Any]) -> Sent:
    """Requests with wrong framing: the server cannot tell where they end."""
    path = draw(st.sampled_from(sorted(BY_PATH)))
    if draw(st.booleans()):
        headers = (JSON_HEADER, ("Transfer-Encoding", "chunked"))
        return Sent("POST", path, draw(_broken_chunks), headers, is_whole=False)
    headers = (JSON_HEADER, *draw(_odd_framings))
    return Sent("POST", path, b"{}", headers, is_whole=False)


requests = st.one_of(*[body_requests()] * 8, other_requests(), broken_requests())
