"""`POST /generate/`: token ids or text in, token ids and log-probabilities out.

Follows `trl.generation.vllm_client.VLLMClient` (trl 0.29 to 1.10). A body with `input_ids` or `text`
is SGLang's (`app/routes/sglang/generate.py`).
"""

from flask import Blueprint, Response

from app.generation import Prompt, run_prompts, token_response
from app.inputs.images import images_of
from app.inputs.sampling import check_num_completions, check_raw_logprobs, sampling_options
from app.inputs.token_ids import prompt_ids_of, was_sent_as_ids
from app.openapi.answers.native import SGLangCompletion
from app.openapi.answers.tokens import BinaryGenerateAnswer, GenerateAnswer
from app.openapi.operation import (
    EVENTS,
    GENERATION_ERRORS,
    IMAGE_ERRORS,
    MSGPACK,
    Example,
    Operation,
)
from app.openapi.parameters import IDEMPOTENCY_KEY, SESSION_ID
from app.routes.sglang.generate import generate_as_sglang
from app.schemas.generation import TokensPrompt
from app.schemas.sglang import GENERATE_BODY, SGLangBody
from app.service import current_service
from app.time_slices import sharing_time

blueprint = Blueprint("generate", __name__)


@blueprint.post("/generate/")
@Operation(
    summary="Generate from ids or text, as TRL's or SGLang's client does.",
    description="A body with `prompts` is TRL's and gets its answer, in MessagePack if `Accept` prefers "
    "it. A body with `input_ids` or `text` is SGLang's and gets an object, or a list for "
    "several completions, or with `stream` events.",
    body=GENERATE_BODY,
    answer=(GenerateAnswer, SGLangCompletion, list[SGLangCompletion]),
    other_media={MSGPACK: BinaryGenerateAnswer, EVENTS: SGLangCompletion},
    errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
    headers=(SESSION_ID, IDEMPOTENCY_KEY),
    examples={
        "ids": Example(
            "Two completions of a prompt of ids",
            {"prompts": [[42, 1393, 14]], "n": 2, "max_tokens": 8, "logprobs": 2},
        ),
        "text": Example(
            "A text, with other sampling options",
            {
                "prompts": ["Hello, world"],
                "max_tokens": 8,
                "temperature": 0.7,
                "generation_kwargs": {"seed": 7, "stop": ["\n\n"]},
            },
        ),
        "sglang": Example(
            "SGLang's form",
            {
                "input_ids": [42, 1393, 14],
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": 8, "temperature": 1.0},
            },
        ),
        "sglang_batch": Example(
            "SGLang's form with several prompts",
            {"text": ["Hello", "world"], "sampling_params": {"max_new_tokens": 4}},
        ),
        "sglang_stream": Example(
            "SGLang's form as a stream",
            {"text": "Hello", "sampling_params": {"max_new_tokens": 4}, "stream": True},
        ),
    },
)
def generate() -> Response:
    """Checks the whole body before it generates anything."""
    with current_service().admit(GENERATE_BODY) as (admission, body):
        if isinstance(body, SGLangBody):
            return generate_as_sglang(admission, body)
        options = sampling_options(body, admission.facts)
        check_raw_logprobs(body, options, admission.facts)
        limit = admission.config.max_completions_per_request
        check_num_completions(len(body.prompts), options.n, limit)
        prompt_ids = prompt_ids_of(body, admission)
        images = images_of(body, admission.facts, admission.config)
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
        adapter = admission.adapter_named(body.lora_name, "lora_name")
        results = run_prompts(
            admission, prompts, options,
            adapter=adapter, min_weight_version=body.min_weight_version,
        )  # fmt: skip
        return token_response(prompts, results, options, with_raw=body.raw_logprobs)
