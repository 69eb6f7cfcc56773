"""`POST /chat/`: conversations in, token ids and log-probabilities out.

Follows `trl.generation.vllm_client.VLLMClient.chat` (trl 0.29 to 1.10); the answer is that of
/generate/.
"""

from flask import Blueprint, Response
from flask import request as http_request

from app.generation import Prompt, answer, check_batch, sampling_options
from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat, render_all
from app.inputs.images import EncodedImages, check_one_per_prompt, processor_kwargs_of, read_images
from app.inputs.token_ids import check_length, checked_ids, tokens_to_keep
from app.routes.weights.lora import adapter_named
from app.schemas.generation import CHAT_BODY, ChatBody, decode_body
from app.service import Admitted, current_service
from titopool.errors import InvalidRequest

blueprint = Blueprint("chat", __name__)


@blueprint.post("/chat/")
def chat() -> Response:
    """Checks and renders the whole request, then generates all of it."""
    with current_service().admit() as admission:
        body = decode_body(http_request.get_data(cache=False), CHAT_BODY)
        options = sampling_options(body, admission.facts)
        limit = admission.service.config.max_completions_per_request
        check_batch(len(body.messages), options.n, limit, "messages")
        adapter = adapter_named(admission.service, body.lora_name, "lora_name")
        return answer(admission, _prompts(admission, body), options, adapter)


def _prompts(admission: Admitted, body: ChatBody) -> list[Prompt]:
    service, facts = admission.service, admission.facts
    if not body.messages:
        raise InvalidRequest("messages: expected at least one conversation, got an empty list",
                             param="messages")  # fmt: skip
    check_one_per_prompt(body.mm_processor_kwargs, len(body.messages), "mm_processor_kwargs")
    chats, images = [], []
    for index, messages in enumerate(body.messages):
        place = f"messages[{index}]"
        conversation = read_conversation(messages, place)
        chats.append(Chat(conversation.messages, place, body.tools, body.chat_template_kwargs))
        encoded = EncodedImages(
            place, f"{place}: image", conversation.images, True, processor_kwargs_of(body, index)
        )
        images.append(read_images(encoded, body, facts, service.config))
    rendered = admission.use_tokenizer(render_all, chats)
    keep = tokens_to_keep(body, facts)
    prompts = []
    for chat, ids, own in zip(chats, rendered, images, strict=True):
        kept = ids if keep is None else ids[-keep:]
        array = checked_ids(kept, chat.place, facts.vocab_size)
        check_length(len(kept), chat.place, facts.max_model_len)
        prompts.append(Prompt(array, chat.place, own))
    return prompts
