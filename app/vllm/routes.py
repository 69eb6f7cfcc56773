"""`POST /inference/v1/generate`: the ids of one prompt in, ids and log-probabilities out.

`POST /inference/v1/abort_requests` ends such requests.
"""

from functools import partial

from flask import Blueprint, Response

from app.call.call import admitted
from app.call.jobs import check_prompt
from app.call.streams import respond
from app.control.pool_commands import end_requests
from app.route.operation import (
    COMMAND_ERRORS,
    EVENTS,
    GENERATION_ERRORS,
    IMAGE_ERRORS,
    STREAMS,
    Example,
    Operation,
)
from app.route.parameters import IDEMPOTENCY_KEY, SESSION_ID
from app.vllm.answers import TokensAnswer, TokensEvent, TokensRequest, check_format, whole_answer
from app.vllm.bodies import GENERATE_BODY, InferenceAbortBody
from app.vllm.prompt_images import images_of_tokens
from app.vllm.stream import TokensEvents
from titopool.settings.sampling import check_sampling

blueprint = Blueprint("inference", __name__)


@blueprint.post("/inference/v1/generate/")
@Operation(
    summary="The ids of one prompt in, the ids of its completions out.",
    description=STREAMS,
    body=GENERATE_BODY,
    answer=TokensAnswer,
    other_media={EVENTS: TokensEvent},
    errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
    headers=(SESSION_ID, IDEMPOTENCY_KEY),
    examples={
        "ids": Example(
            "Two completions",
            {
                "token_ids": [42, 1393, 14],
                "return_token_ids": True,
                "sampling_params": {"max_tokens": 8, "n": 2, "logprobs": 2},
            },
        ),
        "stream": Example(
            "A stream",
            {"token_ids": [42, 1393, 14], "sampling_params": {"max_tokens": 4}, "stream": True},
        ),
    },
)
def generate() -> Response:
    """Runs exactly the ids that the client sends."""
    with admitted(GENERATE_BODY) as (call, (fields, options)):
        call.identify(fields.request_id, fields.session_id)
        adapter = call.adapter_named(fields.model)
        check_sampling(options, call.facts)
        check_format(fields, call.facts)
        call.check_num_completions(1, options.n, "n")
        images = images_of_tokens(fields, call.facts, call.config)
        prompt = check_prompt(fields.token_ids, "token_ids", call.facts, images, fields.cache_salt)
        # A list of ids takes ten times the memory of the prompt.
        fields.token_ids = []
        request = TokensRequest(call, fields, options, prompt, adapter)
        pending = call.make_request(
            [prompt],
            options,
            is_streamed=fields.stream,
            adapter=adapter,
            min_weight_version=fields.min_weight_version,
        )
        events = TokensEvents(request) if fields.stream else None
        return respond(call, pending, whole=partial(whole_answer, request), events=events)


@blueprint.post("/inference/v1/abort_requests/")
@Operation(
    description="A key that is no administrator's ends its own requests only.",
    errors=COMMAND_ERRORS,
    examples={"one": Example("One request", {"request_ids": ["rollout-17"]})},
)
def abort_requests(body: InferenceAbortBody) -> Response:
    """Ends the requests with these ids; without an id, none."""
    if body.request_ids:
        end_requests(body.request_ids)
    return Response()
