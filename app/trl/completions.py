"""`POST /generate/`: token ids or text in, token ids and log-probabilities out.

Follows `trl.generation.vllm_client.VLLMClient` (trl 0.29 to 1.10). The route stands in
`app/generate.py`, as its path is SGLang's too.
"""

from flask import Response

from app.call.admission import Admission
from app.call.bounds import check_num_completions
from app.call.generation import Prompt, run_prompts, token_response
from app.time_slices import sharing_time
from app.trl.bodies import GenerateBody, TokensPrompt
from app.trl.prompts import (
    check_raw_logprobs,
    images_of,
    prompt_ids_of,
    sampling_options,
    was_sent_as_ids,
)


def generate_as_trl(admission: Admission, body: GenerateBody) -> Response:
    """Checks the whole body before it generates anything."""
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
