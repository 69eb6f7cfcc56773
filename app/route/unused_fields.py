"""Fields of OpenAI's and vLLM's bodies that this server does not use.

A field of vLLM's models is honoured if it is a field of the route's struct (`app/openai/bodies.py`,
`app/vllm/bodies.py`) or of `SamplingOptions`. Every other field is here.
`tests/engine/text/test_vllm_fields.py` compares the three with the installed vLLM.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from app.route.decoding import beginning
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SERVER_SET_FIELDS, UNSUPPORTED_FIELDS


class Unused(NamedTuple):
    """A field without effect."""

    # Why, and what to send in its place if there is something.
    reason: str
    # The values that are accepted, because they request nothing; None: every value. Null always is.
    accepted: tuple[Any, ...] | None = ()
    # Whether an empty value requests nothing either.
    may_be_empty: bool = True


_ABOUT_CLIENT = Unused("it describes the client, not the generation", accepted=None)
_TOOLS = Unused("OpenAI has replaced it; use tools and tool_choice")
TRANSFER = Unused("workers do not exchange their KV caches")

# Fields of vLLM's SamplingParams that no request may set.
_SERVER_SET = {name: Unused(reason) for name, reason in SERVER_SET_FIELDS.items()}
_UNSUPPORTED = {name: Unused(reason) for name, reason in UNSUPPORTED_FIELDS.items()} | {
    "routed_experts_prompt_start": Unused(UNSUPPORTED_FIELDS["routed_experts_prompt_start"], (0,))
}

# Of OpenAI's routes.
UNUSED: dict[str, Unused] = {
    **_SERVER_SET,
    **_UNSUPPORTED,
    # vLLM takes the greater of it and the server's own, so 1 requests nothing.
    "stream_interval": Unused("the server sets it, by its setting stream_interval", (1,)),
    # OpenAI's.
    "user": _ABOUT_CLIENT,
    "metadata": _ABOUT_CLIENT,
    "store": _ABOUT_CLIENT,
    "service_tier": _ABOUT_CLIENT,
    "safety_identifier": _ABOUT_CLIENT,
    "prompt_cache_key": Unused("the prefix cache needs no key", accepted=None),
    "audio": Unused("the model returns text"),
    "best_of": Unused("completions are not ranked; send n and choose one", (1,)),
    "echo": Unused("a message does not repeat the one before it", (False,)),
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "modalities": Unused("the model returns text", (["text"],)),
    "prediction": Unused("no output is predicted"),
    "suffix": Unused("a completion has no text after it", ("",)),
    "verbosity": Unused("no chat template reads it; use chat_template_kwargs"),
    # Empty, it asks for a search with OpenAI's defaults.
    "web_search_options": Unused("the server fetches nothing", may_be_empty=False),
    # Hints for the routers of Dynamo, which openpipe-art sends.
    "nvext": Unused("it is for Dynamo's router", accepted=None),
    # vLLM's, for prompts.
    "add_special_tokens": Unused("a chat template writes the special tokens", (False,)),
    "chat_template": Unused("only /v1/chat/completions and /tokenize take one"),
    "documents": Unused("no chat template gets documents; write them into a message"),
    "media_io_kwargs": Unused("images are read in one way"),
    "mm_payload": Unused("no response has a prompt's tensors", ("tensors",)),
    "prompt_embeds": Unused("prompts are text or ids"),
    "truncate_prompt_tokens": Unused("no prompt is shortened; send a shorter one"),
    "truncation_side": Unused("no prompt is shortened; send a shorter one"),
    # vLLM's, for responses.
    "logprob_token_ids": Unused("this route has no field for them; use /generate/"),
    "return_assistant_tokens_mask": Unused("no response has a mask", (False,)),
    "return_mm_kwargs": Unused("no response has a prompt's tensors", (False,)),
    "return_prompt_text": Unused("ids are never decoded; use /detokenize", (False,)),
    "return_token_offsets": Unused("the tokenizer's offsets are not kept", (False,)),
    # vLLM's, others.
    "priority": Unused("jobs are sent in the order in which they came", (0,)),
    "length_penalty": Unused("there is no beam search", (1.0,)),
    "use_beam_search": Unused("there is no beam search", (False,)),
    "kv_transfer_params": TRANSFER,
    "ec_transfer_params": TRANSFER,
    "vllm_xargs": Unused("use extra_args, which vLLM makes of it"),
}
# Of /inference/v1/generate.
UNUSED_OF_GENERATE: dict[str, Unused] = {
    "ec_transfer_params": TRANSFER,
    "kv_transfer_params": TRANSFER,
    "output_mode": Unused("ids are never decoded; use /v1/completions", ("tokens",)),
    # Of vLLM 0.33's /render, whose answer clients send on as it is.
    "parse_context": Unused("ids are never parsed", accepted=None),
    "priority": UNUSED["priority"],
    "reasoning_ended": Unused("it is for a reasoning parser; use /v1/chat/completions"),
    "reasoning_parser_kwargs": Unused("it is for a reasoning parser; use /v1/chat/completions"),
    "token_offsets": Unused("they describe the text of the prompt, which is ids", accepted=None),
}
# Of /tokenize.
UNUSED_OF_TOKENIZE: dict[str, Unused] = {
    name: UNUSED[name] for name in ("documents", "media_io_kwargs")
} | {"mm_processor_kwargs": Unused("an image counts as its one placeholder")}
# Options for what this route returns and others do not.
RETURNED_BY_GENERATE = frozenset(("prompt_logprobs", "routed_experts_prompt_start"))
# Of its `sampling_params`. Clients send vLLM's object as they have it.
UNUSED_SAMPLING: dict[str, Unused] = {
    **{name: one._replace(accepted=None) for name, one in _SERVER_SET.items()},
    **{name: one for name, one in _UNSUPPORTED.items() if name not in RETURNED_BY_GENERATE},
}
# Fields of a chat that say how messages become a prompt, or a completion a message. Where the prompt
# of /v1/completions is ids, they have no effect: gateways that turn chats into ids leave them in the
# body (rLLM).
CHAT_ONLY = frozenset((
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "include_reasoning",
    "parallel_tool_calls", "reasoning_effort", "tool_choice",
))  # fmt: skip


def used_fields(
    values: Mapping[str, Any],
    unused: Mapping[str, Unused],
    within: str = "",
    *,
    nullable: Collection[str] = (),
) -> dict[str, Any]:
    """The fields that have an effect; null means left out, but of `nullable`.

    Raises:
        InvalidRequest: as `check_unused`; `within` comes before its location.
    """
    used = {}
    for name, value in values.items():
        if value is None and name not in nullable:
            continue
        if name in unused:
            check_unused(within + name, value, unused[name])
        else:
            used[name] = value
    return used


def check_unused(location: str, value: Any, unused: Unused) -> None:
    """Checks the value of a field without effect; `location` is where it stands in the body.

    Raises:
        InvalidRequest: the value requests something.
    """
    if unused.accepted is None or value in unused.accepted:
        return
    if unused.may_be_empty and value in ([], {}, ""):
        return
    accepted = " or ".join([*map(json.dumps, unused.accepted), "no value"])
    raise InvalidRequest(
        f"{location}: expected {accepted}, got {beginning(value, 60, json.dumps)}: {unused.reason}",
        param=re.split(r"[.\[]", location)[0],
    )


def check_chat_only(name: str, prompt: Any) -> None:
    """Checks a field of `CHAT_ONLY` beside the `prompt` of /v1/completions.

    Raises:
        InvalidRequest: the prompt has a text.
    """
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if any(isinstance(one, str) for one in prompts):
        raise InvalidRequest(
            f"{name}: expected none with a text, which is no chat; use /v1/chat/completions or leave "
            "it out",
            param=name,
        )
