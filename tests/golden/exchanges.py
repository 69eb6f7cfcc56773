"""The requests, in their order: what any client may do wrong at each rule, then what each rule is for."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from app import create_app
from harness.api_schemas import operation_of
from harness.stub_worker import Fault
from titopool.settings.config import ServerConfig

USER, ADMIN = "a-user", "a-trainer"
# Of a model of tests.
TEXT = "Hello there"
# What `play` replaces in paths and bodies.
PORT, ROOT, MODEL, UPDATE, SESSION = "{PORT}", "{ROOT}", "{MODEL}", "{UPDATE}", "{SESSION}"
# Parts of a rule, as a client may fill them.
PARTS = {"<name>": "none", "<version>": "0", "<path:name>": "none.js", "<session_id>": "none"}
MAX_BODY_BYTES = 100_000
# Of each of the two front ends.
MAX_OPEN_REQUESTS = 4
# One is made by a client without a body.
MAX_SESSIONS = 2
# "half": of a body that never ends; "shut": the client ends its sending side; "crowd": one more at once
# than both front ends take, of which one that is refused counts.
Way = Literal["as always", "half", "shut", "crowd"]


class Exchange(NamedTuple):
    """A request. `body`: JSON; bytes are sent as they are, with `headers`. `way`: how it is sent."""

    rule: str
    name: str
    method: str = "POST"
    path: str = ""
    body: Any = None
    headers: Mapping[str, str] = {}
    key: str = ADMIN
    way: Way = "as always"


def rules() -> dict[str, set[str]]:
    """Each URL rule with its methods."""
    found: dict[str, set[str]] = {}
    for one in create_app(ServerConfig()).url_map.iter_rules():
        found.setdefault(one.rule, set()).update((one.methods or set()) - {"HEAD", "OPTIONS"})
    return found


def all_exchanges() -> Iterator[Exchange]:
    for rule, methods in rules().items():
        yield from of_any_client(rule, methods)
    yield Exchange("/resume/", "after all pauses above", path="/resume")
    for rule, name, *rest in GOOD:
        body, more = (rest[0] if rest else None), (rest[1] if len(rest) > 1 else {})
        yield Exchange(rule, name, **{"path": rule.rstrip("/") or "/", "body": body, **more})


def of_any_client(rule: str, methods: set[str]) -> Iterator[Exchange]:
    """The same mistakes at each rule."""
    path = rule.rstrip("/") or "/"
    for part, one in PARTS.items():
        path = path.replace(part, one)
    for method in sorted(methods):
        yield Exchange(rule, f"{method}, no key", method, path, key="")
        yield Exchange(rule, f"{method}, a wrong key", method, path, key="wrong")
        yield Exchange(rule, f"{method}, a user's key", method, path, key=USER)
    yield Exchange(rule, "another method", "PATCH", path)
    if "POST" in methods:
        json = {"Content-Type": "application/json"}
        yield Exchange(rule, "no JSON", "POST", path, b"{", json)
        yield Exchange(rule, "no object", "POST", path, [])
        yield Exchange(
            rule, "another content type", "POST", path, b"a=1", {"Content-Type": "text/x"}
        )
        yield Exchange(rule, "an unknown field", "POST", path, {"no_such_field": 1})
        too_large = {**json, "Content-Length": str(MAX_BODY_BYTES + 1)}
        yield Exchange(
            rule, "a body that is too large", "POST", path, b" " * (MAX_BODY_BYTES + 1), too_large
        )


def example(path: str, name: str) -> Any:
    """An example of the document, with the port that listens here."""
    return _here(operation_of("post", path).body["examples"][name]["value"])


def _here(value: Any) -> Any:
    if isinstance(value, dict):
        ports = ("port", "master_port")
        return {key: PORT if key in ports else _here(one) for key, one in value.items()}
    return value


def _get(path: str) -> dict[str, Any]:
    return {"method": "GET", "path": path}


def _in_session(path: str, name: str = SESSION) -> dict[str, Any]:
    """By the session's path, with the key that made it."""
    return {"path": f"/sessions/{name}{path}", "key": USER}


# By the session's key.
BY_KEY = {"key": f"session:{SESSION}"}
FIRST_TURN = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
SECOND_TURN = {
    "messages": [
        {"role": "user", "content": TEXT},
        # What the stub says.
        {"role": "assistant", "content": ""},
        {"role": "user", "content": TEXT},
    ],
    "max_tokens": 2,
}
IDS = [5, 6, 7]
RAW = {"logprobs": 0, "max_tokens": 3}
HANGS = [int(Fault.HANG)]
# Requests that do not end before their deadline.
ENDLESS: dict[str, Any] = {
    "/generate/": {"prompts": [HANGS]},
    "/v1/completions/": {"prompt": HANGS},
    "/v1/chat/completions/tokens/": {"messages": [], "tokens": HANGS},
    "/inference/v1/generate/": {"token_ids": HANGS, "sampling_params": {"max_tokens": 2}},
}
WAYS: dict[str, Way] = {
    "a body that does not come": "half", "a client that leaves": "shut",
    "more than are open at once": "crowd",
}  # fmt: skip
GOOD: list[tuple[Any, ...]] = [
    ("/live/", "alive", None, _get("/live")),
    ("/liveness/", "alive", None, _get("/liveness")),
    ("/health/", "alive", None, _get("/health")),
    ("/ready/", "one worker", None, _get("/ready")),
    ("/get_world_size/", "with data parallel ranks", None, _get("/get_world_size?include_dp=true")),
    ("/requests/", "none", None, _get("/requests")),
    ("/workers/", "one", None, _get("/workers")),
    ("/v1/models/", "one", None, _get("/v1/models")),
    ("/server_info/", "settings", None, _get("/server_info?config_format=json")),
    ("/weight_info/", "first", None, _get("/weight_info")),
    ("/weights/", "first", None, _get("/weights")),
    ("/metrics/", "names", None, _get("/metrics")),
    ("/openapi.json", "document", None, _get("/openapi.json")),
    # Token ids in and out.
    ("/generate/", "two prompts of ids", {"prompts": [IDS, [8, 9]], **RAW}),
    ("/generate/", "a group", {"prompts": [IDS], "n": 3, "max_tokens": 2}),
    ("/generate/", "the best two of each token", {"prompts": [IDS], "logprobs": 2, "max_tokens": 2}),
    ("/generate/", "a text", {"prompts": [TEXT], "max_tokens": 2}),
    ("/generate/", "MessagePack", {"prompts": [IDS]}, {"headers": {"Accept": "application/msgpack"}}),
    ("/generate/", "an id of its own", {"prompts": [IDS]}, {"headers": {"X-Request-Id": "mine"}}),
    ("/generate/", "SGLang's", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2}}),
    ("/generate/", "SGLang's, a stream", {"input_ids": IDS, "stream": True}),
    ("/generate/", "no prompt", {"prompts": []}),
    ("/generate/", "an id that is no token", {"prompts": [[5, 2**20]]}),
    ("/generate/", "an id that is no integer", {"prompts": [[5, 1.5]]}),
    ("/generate/", "a prompt that is too long", {"prompts": [[5] * 600]}),
    ("/generate/", "an unknown adapter", {"prompts": [IDS], "lora_name": "none"}),
    ("/generate/", "a number that is out of range", {"prompts": [IDS], "temperature": -1}),
    ("/generate/", "an image where there are none", {"prompts": [TEXT], "images": [["aGk="]]}),
    ("/generate/", "an answer that is too large", {"prompts": [IDS], "n": 4096, "max_tokens": 500, "logprobs": 20}),
    ("/generate/", "a job that fails", {"prompts": [[int(Fault.FAIL)]]}),
    ("/generate/", "a surprise of the engine", {"prompts": [[int(Fault.RAISE)]]}),
    ("/generate/", "a job that never ends", {"prompts": [HANGS]}),
    *((rule, name, body, {"way": way}) for rule, body in ENDLESS.items() for name, way in WAYS.items()),
    ("/chat/", "a question", {"messages": [[{"role": "user", "content": TEXT}]], "max_tokens": 2}),
    ("/chat/", "no message", {"messages": [[]]}),
    ("/v1/completions/", "ids", {"prompt": IDS, "max_tokens": 2, "logprobs": 1}),
    ("/v1/completions/", "a text", {"prompt": TEXT, "max_tokens": 2}),
    ("/v1/completions/", "a stream", {"prompt": IDS, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions/", "echoed prompts", {"prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": 1}),
    ("/v1/completions/", "an unknown model", {"prompt": IDS, "model": "none"}),
    ("/v1/completions/", "a field that is not served", {"prompt": IDS, "suffix": "a"}),
    ("/v1/chat/completions/", "a question", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
    ("/v1/chat/completions/", "with token ids", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "logprobs": True, "return_token_ids": True}),
    ("/v1/chat/completions/", "a stream", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions/", "an unknown role", {"messages": [{"role": "nobody", "content": "a"}]}),
    ("/v1/chat/completions/tokens/", "ids", {"messages": [], "tokens": IDS, "max_tokens": 2}),
    ("/v1/responses/", "a text", {"input": TEXT, "max_output_tokens": 2, "return_token_ids": True, "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}}),
    ("/v1/responses/", "a stream", {"input": [{"role": "user", "content": TEXT}], "max_output_tokens": 2, "stream": True}),
    ("/v1/responses/", "with tools", {
        "instructions": TEXT, "tool_choice": "none", "max_output_tokens": 2,
        "tools": [{"type": "function", "name": "look_up", "parameters": {"type": "object"}}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
            {"type": "function_call", "call_id": "call_1", "name": "look_up", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": TEXT},
        ],
    }),
    ("/v1/responses/", "an input that is too long", {"input": "a " * 2000}),
    ("/v1/responses/", "state that is not kept", {"input": TEXT, "previous_response_id": "resp_1"}),
    ("/v1/responses/", "an item that is not served", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("/v1/messages/", "a question with token ids", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "return_token_ids": True}),
    ("/v1/messages/", "a stream", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "stream": True}),
    ("/v1/messages/", "a result of a tool", {
        "system": TEXT, "max_tokens": 2, "tool_choice": {"type": "none"},
        "tools": [{"name": "look_up", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "look_up", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": TEXT}]},
        ],
    }),
    ("/v1/messages/", "a conversation that is too long", {"messages": [{"role": "user", "content": "a " * 2000}], "max_tokens": 2}),
    ("/v1/messages/", "a tool of the service", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("/v1/messages/", "a key in Anthropic's header", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}, {"key": "", "headers": {"x-api-key": USER}}),
    ("/v1/messages/count_tokens/", "a question", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/inference/v1/generate/", "ids", {"token_ids": IDS, "sampling_params": {"max_tokens": 2}}),
    ("/inference/v1/generate/", "a stream", {"token_ids": IDS, "sampling_params": {"max_tokens": 2}, "stream": True}),
    ("/inference/v1/abort_requests/", "none of this name", {"request_ids": ["none"]}),
    ("/v1/chat/completions/render/", "a question", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/v1/completions/render/", "a text", {"prompt": TEXT}),
    ("/mismatch/", "an unknown request", {"request_id": "none", "logprobs": [[0.0]]}),
    ("/get_sequence_logprobs/", "scores", {"sequences": [[5, 6, 7]], "prompt_lengths": [1], "top_logprobs": 1}),
    ("/get_sequence_logprobs/", "a length beyond the sequence", {"sequences": [[5, 6, 7]], "prompt_lengths": [9], "top_logprobs": 1}),
    ("/tokenize/", "a text", {"prompt": TEXT}),
    ("/tokenize/", "messages", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/detokenize/", "ids", {"tokens": IDS}),
    # Pauses and aborts.
    ("/pause/", "keep", None, {"path": "/pause?mode=keep"}),
    ("/is_paused/", "paused", None, _get("/is_paused")),
    ("/resume/", "again"),
    ("/is_paused/", "running", None, _get("/is_paused")),
    ("/pause/", "an unknown mode", None, {"path": "/pause?mode=no"}),
    ("/pause_generation/", "in place", {"mode": "in_place"}),
    ("/continue_generation/", "again", {}),
    ("/abort_requests/", "none of this name", {"request_ids": ["none"]}),
    ("/abort_request/", "none of this name", {"rid": "none"}),
    ("/abort_request/", "all", {"abort_all": True}),
    ("/flush_cache/", "SGLang's"),
    ("/reset_prefix_cache/", "vLLM's"),
    ("/reset_mm_cache/", "vLLM's"),
    ("/reset_encoder_cache/", "vLLM's"),
    # Weights.
    ("/weights/commit/", "without an update", {"update": "none", "policy": "keep"}),
    ("/weights/init/", "a session", example("/weights/init", "gloo")),
    ("/weights/begin/", "an update", example("/weights/begin", "partial")),
    ("/weights/", "during an update", None, _get("/weights")),
    ("/weights/begin/", "a second update", example("/weights/begin", "partial")),
    ("/weights/commit/", "the update", {"update": UPDATE, "policy": "keep"}),
    ("/weights/", "after an update", None, _get("/weights")),
    ("/weights/begin/", "another update", example("/weights/begin", "partial")),
    ("/weights/abort/", "the update", {"update": UPDATE}),
    ("/weights/close/", "the session", example("/weights/close", "one")),
    ("/weights/accept/", "what is there"),
    ("/init_weight_transfer_engine/", "vLLM's", example("/init_weight_transfer_engine", "gloo")),
    ("/start_weight_update/", "vLLM's"),
    ("/update_weights/", "vLLM's", example("/update_weights", "tensors")),
    ("/finish_weight_update/", "vLLM's", example("/finish_weight_update", "label")),
    ("/finish_weight_update/", "without an update", {}),
    ("/update_weight_version/", "SGLang's", {"new_version": "step-8"}),
    ("/weight_info/", "with a label", None, _get("/weight_info")),
    ("/shutdown_weight_transfer_engine/", "vLLM's"),
    ("/init_communicator/", "TRL's", {"host": "127.0.0.1", "port": PORT, "world_size": 2, "client_device_uuid": ""}),
    ("/update_named_param/", "TRL's", {"name": "w", "dtype": "float32", "shape": [2]}),
    ("/reset_prefix_cache/", "TRL's end of an update", {}),
    ("/close_communicator/", "TRL's"),
    ("/update_weights_from_disk/", "a folder", {"model_path": MODEL}),
    ("/update_weights_from_disk/", "no folder", {"model_path": "/nowhere"}),
    ("/weight_checker/", "a checksum", {"action": "checksum"}),
    ("/v1/load_lora_adapter/", "a folder", {"lora_name": "math", "lora_path": f"{ROOT}/math-1"}),
    ("/v1/load_lora_adapter/", "again", {"lora_name": "math", "lora_path": f"{ROOT}/math-1"}),
    ("/load_lora_adapter/", "no folder", {"lora_name": "none", "lora_path": f"{ROOT}/none"}),
    ("/v1/models/", "with an adapter", None, _get("/v1/models")),
    ("/v1/completions/", "an adapter", {"prompt": IDS, "model": "math", "max_tokens": 1}),
    ("/unload_lora_adapter/", "the adapter", {"lora_name": "math"}),
    ("/v1/unload_lora_adapter/", "again", {"lora_name": "math"}),
    # Sessions.
    ("/sessions/", "metadata that are too long", b'{"metadata": {"a": "' + b"b" * 70_000 + b'"}}', {"headers": {"Content-Type": "application/json"}}),
    ("/sessions/", "a session", {"metadata": {"task": 17}}, {"key": USER}),
    ("/sessions/", "more than are open at once", {}),
    ("/v1/models/", "in a session", None, {"method": "GET", **_in_session("/v1/models")}),
    ("/v1/chat/completions/", "the first turn of a session", FIRST_TURN, _in_session("/v1/chat/completions")),
    ("/v1/chat/completions/", "the second turn, by the session's key", {**SECOND_TURN, "return_token_ids": True}, BY_KEY),
    ("/v1/chat/completions/", "a stream in a session", {**SECOND_TURN, "stream": True}, _in_session("/v1/chat/completions")),
    ("/v1/chat/completions/", "two choices in a session", {**FIRST_TURN, "n": 2}, _in_session("/v1/chat/completions")),
    ("/v1/chat/completions/", "a session that is unknown", FIRST_TURN, _in_session("/v1/chat/completions", "none")),
    ("/v1/chat/completions/", "the key of a session that is unknown", FIRST_TURN, {"key": "session:none"}),
    ("/v1/chat/completions/", "a session's key in another one's path", FIRST_TURN, {**_in_session("/v1/chat/completions", "none"), **BY_KEY}),
    ("/v1/chat/completions/", "a session that another key made", FIRST_TURN, {**_in_session("/v1/chat/completions"), "key": ADMIN}),
    ("/v1/completions/", "ids in a session", {"prompt": IDS, "max_tokens": 2}, _in_session("/v1/completions")),
    ("/v1/completions/", "ids that go on, by the session's key", {"prompt": [*IDS, 7, 6, 8], "max_tokens": 2}, BY_KEY),
    ("/v1/completions/", "a text in a session", {"prompt": TEXT, "max_tokens": 2}, _in_session("/v1/completions")),
    ("/v1/completions/", "two prompts in a session", {"prompt": [IDS, IDS]}, _in_session("/v1/completions")),
    ("/v1/messages/", "in a session", {**SECOND_TURN, "system": TEXT}, _in_session("/v1/messages")),
    ("/v1/messages/", "a stream by a session's key", {**SECOND_TURN, "stream": True}, {"key": "", "headers": {"x-api-key": BY_KEY["key"]}}),
    ("/v1/messages/", "a session that is unknown", FIRST_TURN, _in_session("/v1/messages", "none")),
    ("/v1/messages/count_tokens/", "in a session", {"messages": FIRST_TURN["messages"]}, _in_session("/v1/messages/count_tokens")),
    ("/v1/responses/", "in a session", {"input": TEXT, "max_output_tokens": 2}, _in_session("/v1/responses")),
    ("/v1/responses/", "a stream by a session's key", {"input": SECOND_TURN["messages"], "max_output_tokens": 2, "stream": True}, BY_KEY),
    ("/v1/responses/", "a session that is unknown", {"input": TEXT}, _in_session("/v1/responses", "none")),
    ("/generate/", "a session's key", {"prompts": [IDS]}, BY_KEY),
    ("/sessions/<session_id>/", "its turns", None, {"method": "GET", **_in_session("")}),
    ("/sessions/<session_id>/", "a session that another key made", None, {"method": "GET", **_in_session(""), "key": ADMIN}),
    ("/sessions/<session_id>/", "the session's own key", None, {"method": "GET", **_in_session(""), **BY_KEY}),
    ("/sessions/<session_id>/samples/", "its samples", None, {"method": "GET", **_in_session("/samples")}),
    ("/sessions/<session_id>/samples/", "MessagePack", None, {"method": "GET", **_in_session("/samples"), "headers": {"Accept": "application/msgpack"}}),
    ("/sessions/<session_id>/", "without records", None, {"method": "GET", **_in_session("?records=false")}),
    ("/sessions/<session_id>/", "a flag that is none", None, {"method": "GET", **_in_session("?records=maybe")}),
    ("/sessions/<session_id>/samples/", "as miles asks for them", {"max_seq_len": 40, "metadata": {"reward": 1.0}}, _in_session("/samples")),
    ("/sessions/<session_id>/samples/", "a length of nothing", {"max_seq_len": 0}, _in_session("/samples")),
    ("/sessions/<session_id>/traces/", "as rLLM asks for them", None, {"method": "GET", **_in_session("/traces?since=5&limit=2")}),
    ("/sessions/<session_id>/traces/", "a limit of none", None, {"method": "GET", **_in_session("/traces?limit=0")}),
    ("/sessions/<session_id>/", "its end", None, {"method": "DELETE", **_in_session("")}),
    ("/sessions/<session_id>/", "a second end", None, {"method": "DELETE", **_in_session("")}),
    ("/sessions/<session_id>/", "after its end", None, {"method": "GET", **_in_session("")}),
    ("/sessions/<session_id>/samples/", "after its end", None, {"method": "GET", **_in_session("/samples")}),
    ("/v1/chat/completions/", "a session that has ended", FIRST_TURN, _in_session("/v1/chat/completions")),
    ("/v1/messages/", "a session that has ended", FIRST_TURN, BY_KEY),
    # The pool.
    ("/workers/scale/", "without a supervisor", {"num_workers": 2}),
    ("/workers/connections/", "none"),
    ("/workers/<name>/drain/", "nobody", None, {"path": "/workers/nobody/drain"}),
    ("/workers/<name>/drain/", "the only one", None, {"path": "/workers/0/drain"}),
    ("/generate/", "after the last worker", {"prompts": [IDS]}),
]  # fmt: skip
