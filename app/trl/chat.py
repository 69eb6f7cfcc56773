"""`POST /chat/`: conversations in, token ids and log-probabilities out.

Follows `trl.generation.vllm_client.VLLMClient.chat` (trl 0.29 to 1.10). The response has the
fields of /generate/.
"""

from flask import Blueprint, Response

from app.call.admission import Admission
from app.call.bounds import check_num_completions
from app.call.generation import Prompt, check_prompt, run_prompts, token_response
from app.call.service import current_service
from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat
from app.inputs.images import EncodedImages, read_images
from app.route.operation import (
    GENERATION_ERRORS,
    IMAGE_ERRORS,
    MSGPACK,
    QUESTION,
    Example,
    Operation,
)
from app.route.parameters import IDEMPOTENCY_KEY, SESSION_ID
from app.trl.bodies import CHAT_BODY, ChatBody
from app.trl.prompts import (
    check_one_per_prompt,
    check_raw_logprobs,
    processor_kwargs_of,
    sampling_options,
    tokens_to_keep,
)
from titopool.answers.generation import BinaryGenerateAnswer, GenerateAnswer
from titopool.errors import InvalidRequest

blueprint = Blueprint("chat", __name__)


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
    with current_service().admit(CHAT_BODY) as (admission, body):
        options = sampling_options(body, admission.facts)
        check_raw_logprobs(body, options, admission.facts)
        limit = admission.config.max_completions_per_request
        check_num_completions(len(body.messages), options.n, limit, "messages")
        adapter = admission.adapter_named(body.lora_name, "lora_name")
        prompts = _render_prompts(admission, body)
        results = run_prompts(
            admission, prompts, options,
            adapter=adapter, min_weight_version=body.min_weight_version,
        )  # fmt: skip
        return token_response(prompts, results, options, with_raw=body.raw_logprobs)


def _render_prompts(admission: Admission, body: ChatBody) -> list[Prompt]:
    facts = admission.facts
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
            read_images(encoded, facts, admission.config, truncated_to=body.truncate_prompt_tokens)
        )
    # The objects of a message take ten times the memory of the prompt.
    body.messages = []
    keep = tokens_to_keep(body, facts)
    rendered = admission.render(chats, is_truncated=keep is not None)
    return [
        check_prompt(ids if keep is None else ids[-keep:], chat.location, facts, prompt_images)
        for chat, ids, prompt_images in zip(chats, rendered, images, strict=True)
    ]
