"""`POST /generate/`: token ids or text in, token ids and log-probabilities out.

Follows `trl.generation.vllm_client.VLLMClient` (trl 0.29 to 1.10).
"""

from flask import Blueprint, Response
from flask import request as http_request

from app.generation import Prompt, answer, check_batch, sampling_options
from app.inputs.images import images_of
from app.inputs.token_ids import prompt_ids_of, was_sent_as_ids
from app.routes.weights.lora import adapter_named
from app.schemas.generation import GENERATE_BODY, TokensPrompt, decode_body
from app.service import Admitted, current_service

blueprint = Blueprint("generate", __name__)


@blueprint.post("/generate/")
def generate() -> Response:
    """Checks the whole request, then generates all of it."""
    with current_service().admit() as admission:
        return _generate(admission)


def _generate(admission: Admitted) -> Response:
    body = decode_body(http_request.get_data(cache=False), GENERATE_BODY)
    service, facts = admission.service, admission.facts
    options = sampling_options(body, facts)
    check_batch(len(body.prompts), options.n, service.config.max_completions_per_request)
    prompt_ids = prompt_ids_of(body, admission)
    images = images_of(body, facts, service.config)
    prompts = [
        Prompt(
            token_ids,
            f"prompts[{index}]",
            images[index],
            sent.cache_salt if isinstance(sent, TokensPrompt) else None,
            was_sent_as_ids(token_ids, sent),
        )
        for index, (token_ids, sent) in enumerate(zip(prompt_ids, body.prompts, strict=True))
    ]
    adapter = adapter_named(service, body.lora_name, "lora_name")
    return answer(admission, prompts, options, adapter)
