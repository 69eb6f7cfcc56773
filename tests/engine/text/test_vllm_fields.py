"""Every field of vLLM's request models is honoured, accepted without effect, or refused by name."""

import json
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
import pytest

from app.openai.bodies import CHAT_COMPLETIONS_BODY, COMPLETIONS_BODY, ChatFields, CompletionsFields
from app.responses.bodies import RESPONSES_BODY, ResponsesFields
from app.route.decoding import decode_body
from app.route.unused_fields import CHAT_ONLY, UNUSED, UNUSED_OF_GENERATE, UNUSED_SAMPLING
from app.vllm.bodies import GENERATE_BODY, GenerateFields
from tests.kit.peers.vllm_protocol import vllm_protocol
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions

# The import of vLLM's models takes as long as a server's start.
pytestmark = pytest.mark.server


class Ours(NamedTuple):
    """What this server does with one of vLLM's models."""

    decoder: Any
    # Fields with an effect, and all others that the route knows.
    honoured: set[str]
    others: set[str]
    # A body with the required fields only.
    body: dict[str, Any]


# By the module and name of vLLM's model. A further route is a further entry.
MODELS = {
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest": Ours(
        COMPLETIONS_BODY,
        {*CompletionsFields.__struct_fields__, *SamplingOptions.__struct_fields__},
        {*UNUSED, *CHAT_ONLY},
        {"prompt": [1, 2]},
    ),
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": Ours(
        CHAT_COMPLETIONS_BODY,
        {*ChatFields.__struct_fields__, *SamplingOptions.__struct_fields__},
        set(UNUSED),
        {"messages": [{"role": "user", "content": "a"}]},
    ),
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest": Ours(
        RESPONSES_BODY,
        {*ResponsesFields.__struct_fields__, *SamplingOptions.__struct_fields__},
        set(RESPONSES_BODY.unused),
        {"input": "a"},
    ),
    # Of /inference/v1/generate. Its module has moved.
    "GenerateRequest": Ours(
        GENERATE_BODY,
        set(GenerateFields.__struct_fields__),
        set(UNUSED_OF_GENERATE),
        {"token_ids": [1, 2], "sampling_params": {}},
    ),
}


def model_named(name: str) -> Any:
    module, _, model = name.partition(":")
    return getattr(import_module(module) if model else vllm_protocol(), model or name)


def vllms_options() -> dict[str, Any]:
    """The public fields of vLLM's SamplingParams with their defaults, as JSON."""
    from vllm import SamplingParams

    defaults = msgspec.json.encode(msgspec.structs.asdict(SamplingParams()))
    return {name: one for name, one in json.loads(defaults).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", MODELS)
def test_every_field_of_vllm_is_in_one_of_the_lists(name: str):
    ours = MODELS[name]
    unknown = sorted(model_named(name).model_fields.keys() - ours.honoured - ours.others)
    assert not unknown, (
        f"{name} of the installed vLLM has fields that no list of this server has: {unknown}"
    )


@pytest.mark.parametrize("name", MODELS)
def test_vllms_defaults_are_accepted(name: str):
    """A client that writes out every field requests nothing by it."""
    ours = MODELS[name]
    defaults = json.loads(model_named(name).model_validate(ours.body).model_dump_json())
    for field, value in defaults.items():
        try:
            decode_body(json.dumps(ours.body | {field: value}).encode(), ours.decoder)
        except InvalidRequest as error:
            pytest.fail(f"{name}.{field} = {value!r}: {error}")


def test_every_sampling_option_of_vllm_is_in_one_of_the_lists():
    known = {*SamplingOptions.__struct_fields__, *UNUSED_SAMPLING}
    assert vllms_options().keys() <= known


def test_vllms_sampling_options_are_accepted_as_they_are():
    sent = {"token_ids": [1], "sampling_params": vllms_options()}
    _, options = decode_body(json.dumps(sent).encode(), GENERATE_BODY)
    assert options.temperature == 1.0
    assert options.max_tokens == 16
