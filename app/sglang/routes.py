"""`POST /generate` in SGLang's form: text or ids in, text, ids and log-probabilities out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

from flask import Response
from msgspec.structs import replace

from app.call.call import Call
from app.call.jobs import Prompt, check_prompt
from app.call.streams import respond
from app.call.token_texts import TokenTexts
from app.inputs.images import EncodedImages, read_images
from app.sglang.answers import (
    PromptRequest,
    SGLangRequest,
    check_experts,
    check_experts_start,
    check_start,
    whole_answer,
)
from app.sglang.bodies import SGLangBody, SGLangPrompt, split_prompts, with_sglang_names
from app.sglang.stream import SGLangEvents
from app.time_slices import sharing_time
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions, check_sampling
from titopool.wire.messages import WorkerFacts


def generate_as_sglang(call: Call, body: SGLangBody) -> Response:
    """Checks the whole body before it generates anything."""
    fields, num_prompts = body.fields, body.batch_size or 1
    # Before there is an object for each prompt.
    call.check_num_completions(num_prompts, 1, body.source)
    sent = split_prompts(body)
    num_completions = [one.options.n for one in sent]
    call.check_num_completions(num_prompts, max(num_completions), body.source)
    body.values.clear()
    call.identify(sent[0].fields.rid, fields.session_id)
    check_experts(fields, call.facts)
    _check_options(sent, call.facts)
    prompts = _checked_prompts(call, body, sent)
    starts = accumulate(num_completions, initial=0)
    request = SGLangRequest(
        call,
        fields,
        [PromptRequest(*one) for one in zip(sent, prompts, starts, strict=False)],
        body.batch_size is not None or num_completions[0] > 1,
        TokenTexts(call, as_ids=False) if fields.return_text_in_logprobs else None,
    )
    pending = call.make_request(
        prompts, sent[0].options,
        is_streamed=fields.stream, min_weight_version=fields.min_weight_version,
    )  # fmt: skip
    with _naming_grammars():
        events = SGLangEvents(request) if fields.stream else None
        return respond(call, pending, whole=partial(whole_answer, request), events=events)


@contextmanager
def _naming_grammars() -> Iterator[None]:
    """Names the field that the client sent where an engine refuses a grammar."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != "structured_outputs":
            raise
        raise with_sglang_names(error, "sampling_params") from None


def _check_options(sent: Sequence[SGLangPrompt], facts: WorkerFacts) -> None:
    for options in sharing_time({id(one.options): one.options for one in sent}.values()):
        try:
            check_sampling(options, facts)
        except InvalidRequest as error:
            raise with_sglang_names(error, "sampling_params") from None


def _checked_prompts(call: Call, body: SGLangBody, sent: Sequence[SGLangPrompt]) -> list[Prompt]:
    """The prompts, with options, adapter and id of their own."""
    if body.source == "text":
        all_ids = call.encode(
            [one.fields.text or "" for one in sent], [one.location for one in sent]
        )
    else:
        all_ids = [one.fields.input_ids or [] for one in sent]
    adapters = {
        name: call.adapter_named(name, "lora_path")
        for name in {one.fields.lora_path for one in sent}
    }
    kwargs, facts = body.fields.mm_processor_kwargs, call.facts
    # By the identity of the options with them.
    without_prompts: dict[int, SamplingOptions] = {}
    # By the identity of the options, and the token from which on the engine returns experts.
    with_experts: dict[tuple[int, int], SamplingOptions] = {}
    prompts = []
    for one, ids in sharing_time(zip(sent, all_ids, strict=True)):
        files, options = one.fields.image_data or [], one.options
        encoded = EncodedImages(
            one.location, one.images, [files] if isinstance(files, str) else files,
            not isinstance(files, str), kwargs,
        )  # fmt: skip
        images = read_images(encoded, facts, call.config)
        prompt = check_prompt(ids, one.location, facts, images, cache_salt=one.fields.cache_salt)
        # A list of ids takes ten times the memory of the prompt.
        one.fields.input_ids = None
        # Images add tokens, whose number the worker knows.
        if options.prompt_logprobs is not None and not images.images:
            check_start(one, len(ids))
            if one.fields.logprob_start_len == len(ids):
                # Nothing is shown of them, and they would cost the prefix cache.
                options = without_prompts.setdefault(
                    id(options), replace(options, prompt_logprobs=None)
                )
        if body.fields.return_routed_experts:
            start = body.fields.routed_experts_start_len
            if not images.images:
                check_experts_start(start, one.location, len(ids))
            # The engine returns at least the row of the prompt's last token.
            start = min(start, len(ids) - 1)
            options = with_experts.setdefault(
                (id(options), start), replace(options, routed_experts_prompt_start=start)
            )
        prompts.append(
            prompt._replace(
                options=options,
                adapter=adapters[one.fields.lora_path],
                client_id=one.fields.rid or call.id,
            )
        )
    return prompts
