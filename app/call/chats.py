"""One turn of a chat: the prompt as the model's chat template writes messages, tools and images.

Protocols translate their bodies to `ChatFields`.
"""

from typing import Any, NamedTuple

import numpy as np

from app.call.call import Call
from app.call.jobs import Prompt, check_prompt
from app.inputs.chat_messages import read_conversation
from app.inputs.images import EncodedImages, read_images
from app.inputs.tools import Tools, make_chat, read_tools
from app.outputs.sampled import Sampled
from app.pool.request import Request
from app.route.fields import ChatFields, StreamedFields
from titopool.settings.sampling import SamplingOptions, check_sampling


def prompt_of_chat(call: Call, fields: ChatFields, tools: Tools) -> Prompt:
    """The prompt of a chat, whose `messages` then only have the last one's role.

    Raises:
        InvalidRequest: a message, a part or an image is malformed, or the template refuses them.
        PromptTooLong: the prompt leaves no room for a token.
    """
    facts = call.facts
    call.templates.check(fields.chat_template)
    # With `tokens`, no template renders the messages: malformed tool calls of the model may stay.
    conversation = read_conversation(fields.messages, "messages", is_rendered=fields.tokens is None)
    encoded = EncodedImages(
        "messages", "messages: image", conversation.images, True, fields.mm_processor_kwargs or {}
    )
    images = read_images(encoded, facts, call.config)
    if fields.tokens is None:
        chat = make_chat(fields, conversation.messages, tools)
        # The objects of a message take ten times the memory of the prompt.
        # Answers need the last one's role.
        fields.messages = [{"role": one["role"]} for one in fields.messages[-1:]]
        ids = (
            call.render([chat])[0]
            if call.turn is None
            else call.turn.prompt_of_chat(call, chat, images)
        )
        return check_prompt(ids, "messages", facts, images, fields.cache_salt)
    prompt = check_prompt(fields.tokens, "tokens", facts, images, fields.cache_salt)
    call.drift.compare(fields, tools)
    return prompt


class ChatTurn(NamedTuple):
    """A checked request for the next message of a `ChatFields`."""

    call: Call
    fields: StreamedFields
    prompt: Prompt
    options: SamplingOptions
    # The name of a LoRA adapter; "": the base model.
    adapter: str

    @property
    def model(self) -> str:
        """The name that answers have."""
        return self.adapter or self.call.facts.model


def make_turn(
    call: Call, fields: StreamedFields, chat: ChatFields, options: SamplingOptions
) -> tuple[ChatTurn, Request]:
    """Checks a chat and makes the request for its next message, not yet submitted.

    Raises:
        TitopoolError: as `prompt_of_chat`, `check_sampling`, `read_tools` and `Call.make_request`.
    """
    call.identify(fields.request_id, fields.session_id)
    adapter = call.adapter_named(fields.model)
    if fields.return_token_ids:
        options.logprobs = options.logprobs or 0
    check_sampling(options, call.facts)
    tools = read_tools(chat, call.facts)
    turn = ChatTurn(call, fields, prompt_of_chat(call, chat, tools), options, adapter)
    request = call.make_request(
        [turn.prompt],
        options,
        is_streamed=fields.stream,
        adapter=adapter,
        chat=tools.parsing,
        min_weight_version=fields.min_weight_version,
    )
    return turn, request


def sampled_fields(
    turn: ChatTurn, sampled: Sampled, prompt_ids: np.ndarray, adapter_version: int | None
) -> dict[str, Any]:
    """The fields of `SampledFields` that there are."""
    found: dict[str, Any] = {}
    if sampled.parsing_error:
        found["parsing_error"] = sampled.parsing_error
    if not turn.fields.return_token_ids:
        return found
    found |= {
        "finish_reason": sampled.finish_reason,
        "prompt_token_ids": prompt_ids,
        "token_ids": np.frombuffer(sampled.ids, np.int32),
        "token_logprobs": np.frombuffer(sampled.logprobs, np.float32),
        "weight_versions": sampled.weight_versions,
        **({"kv_from": sampled.kv_from} if sampled.kv_from else {}),
    }
    return found | ({"lora_version": adapter_version} if turn.adapter else {})
