"""TRL's generating routes: token ids, text or conversations in, token ids and log-probabilities out.

Follows `trl.generation.vllm_client.VLLMClient` (trl 0.29 to 1.10), its `generate` and `chat`. The route
`POST /generate/` stands in `app/generate.py`, as its path is SGLang's too.
"""

from collections.abc import Sequence

from flask import Blueprint, Response
from flask import request as http_request

from app.call.call import Call, admitted
from app.call.jobs import Prompt, check_prompt, expanded_ids
from app.http.responses import respond_in_parts
from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat
from app.inputs.images import EncodedImages, read_images
from app.outputs.token_arrays import JSON, MSGPACK, binary_reply, is_binary, json_reply
from app.route.operation import (
    GENERATION_ERRORS,
    IMAGE_ERRORS,
    QUESTION,
    Example,
    Operation,
)
from app.route.parameters import IDEMPOTENCY_KEY, SESSION_ID
from app.time_slices import sharing_time
from app.trl.bodies import CHAT_BODY, ChatBody, GenerateBody, TokensPrompt
from app.trl.prompts import (
    check_one_per_prompt,
    check_raw_logprobs,
    images_of,
    processor_kwargs_of,
    prompt_ids_of,
    sampling_options,
    tokens_to_keep,
    was_sent_as_ids,
)
from titopool.answers.generation import BinaryGenerateAnswer, GenerateAnswer
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import Completed

blueprint = Blueprint("chat", __name__)


def generate_as_trl(call: Call, body: GenerateBody) -> Response:
    """Checks the whole body before it generates anything."""
    options = sampling_options(body, call.facts)
    check_raw_logprobs(body, options, call.facts)
    call.check_num_completions(len(body.prompts), options.n, "prompts")
    prompt_ids = prompt_ids_of(body, call)
    images = images_of(body, call.facts, call.config)
    prompts = [
        Prompt(
            token_ids,
            f"prompts[{index}]",
            images[index],
            sent.cache_salt if isinstance(sent, TokensPrompt) else None,
            was_sent_as_ids(token_ids, sent),
        )
        for index, (token_ids, sent) in enumerate(
            sharing_time(zip(prompt_ids, body.prompts, strict=True))
        )
    ]
    # A list of ids takes ten times the memory of the prompt.
    body.prompts, body.images = [], None
    adapter = call.adapter_named(body.lora_name, "lora_name")
    request = call.make_request(
        prompts, options, adapter=adapter, min_weight_version=body.min_weight_version
    )
    results = call.run(request)
    return token_response(prompts, results, options, with_raw=body.raw_logprobs)


@blueprint.post("/chat/")
@Operation(
    summary="Generate from conversations, as TRL's client does.",
    body=CHAT_BODY,
    answer=GenerateAnswer,
    other_media={MSGPACK: BinaryGenerateAnswer},
    errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
    headers=(SESSION_ID, IDEMPOTENCY_KEY),
    examples={"question": Example("A question", {"messages": [QUESTION], "max_tokens": 8})},
)
def chat() -> Response:
    """Checks and renders all conversations before it generates anything."""
    with admitted(CHAT_BODY) as (call, body):
        options = sampling_options(body, call.facts)
        check_raw_logprobs(body, options, call.facts)
        call.check_num_completions(len(body.messages), options.n, "messages")
        adapter = call.adapter_named(body.lora_name, "lora_name")
        prompts = _render_prompts(call, body)
        request = call.make_request(
            prompts, options, adapter=adapter, min_weight_version=body.min_weight_version
        )
        results = call.run(request)
        return token_response(prompts, results, options, with_raw=body.raw_logprobs)


def _render_prompts(call: Call, body: ChatBody) -> list[Prompt]:
    facts = call.facts
    if not body.messages:
        raise InvalidRequest("messages: expected at least one conversation, got an empty list",
                             param="messages")  # fmt: skip
    check_one_per_prompt(body.mm_processor_kwargs, len(body.messages), "mm_processor_kwargs")
    chats, images = [], []
    for index, messages in enumerate(body.messages):
        location = f"messages[{index}]"
        conversation = read_conversation(messages, location)
        chats.append(Chat(conversation.messages, location, body.tools, body.chat_template_kwargs))
        encoded = EncodedImages(
            location,
            f"{location}: image",
            conversation.images,
            True,
            processor_kwargs_of(body, index),
        )
        images.append(
            read_images(encoded, facts, call.config, truncated_to=body.truncate_prompt_tokens)
        )
    # The objects of a message take ten times the memory of the prompt.
    body.messages = []
    keep = tokens_to_keep(body, facts)
    rendered = call.render(chats, is_truncated=keep is not None)
    return [
        check_prompt(ids if keep is None else ids[-keep:], chat.location, facts, prompt_images)
        for chat, ids, prompt_images in zip(chats, rendered, images, strict=True)
    ]


def token_response(
    prompts: Sequence[Prompt],
    results: list[Completed],
    options: SamplingOptions,
    *,
    with_raw: bool,
) -> Response:
    """The response of /generate/ and /chat/: MessagePack if the client prefers it, else JSON.

    Empties `results`. MessagePack leaves out prompt ids that the client sent itself.
    """
    ids = expanded_ids(prompts, results)
    with_logprobs = options.logprobs is not None or options.logprob_token_ids is not None
    asked = {"with_logprobs": with_logprobs, "with_raw": with_raw}
    if not is_binary(http_request.environ.get("HTTP_ACCEPT", "")):
        return respond_in_parts(json_reply(ids, results, **asked), JSON)
    unknown = [
        None if prompt.sent_as_ids and len(run) == len(prompt.token_ids) else run
        for prompt, run in zip(prompts, ids, strict=True)
    ]
    return respond_in_parts(binary_reply(unknown, results, **asked), MSGPACK)
