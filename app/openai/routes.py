"""`POST /v1/completions`, `/v1/chat/completions` and `/v1/chat/completions/tokens`.

OpenAI's bodies and responses with vLLM's extensions, so that the openai package works. The last
route runs exactly the ids in `tokens`; `messages` only describe them (prime-rl, verifiers 0.1.8
and 0.1.9).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from flask import Blueprint, Response

from app.call.call import Call, admitted
from app.call.chats import prompt_of_chat
from app.call.jobs import Prompt, check_prompt
from app.call.streams import respond
from app.call.token_texts import TokenTexts
from app.conversations.turn import IDS, TEXT, SessionTurn
from app.inputs.tokenizer import decode_all
from app.inputs.tools import read_tools
from app.openai.answers import ChatAnswer, ChatEvent, CompletionsAnswer, OpenAIRequest, whole_answer
from app.openai.bodies import CHAT_COMPLETIONS_BODY, COMPLETIONS_BODY, CompletionsFields
from app.openai.stream import OpenAIEvents
from app.route.fields import ChatFields, RouteFields
from app.route.operation import (
    EVENTS,
    GENERATION_ERRORS,
    IMAGE_ERRORS,
    QUESTION,
    STREAMS,
    Example,
    Operation,
)
from app.route.parameters import SESSION_ID
from app.time_slices import sharing_time
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions, check_sampling

# Makes a response of a checked request.
Answer = Callable[[OpenAIRequest], Response]
blueprint = Blueprint("openai", __name__)
_of_chat = partial(
    Operation,
    body=CHAT_COMPLETIONS_BODY,
    answer=ChatAnswer,
    other_media={EVENTS: ChatEvent},
    errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
    headers=(SESSION_ID,),
)


@blueprint.post("/v1/completions/")
@Operation(
    description=STREAMS,
    body=COMPLETIONS_BODY,
    answer=CompletionsAnswer,
    other_media={EVENTS: CompletionsAnswer},
    errors=GENERATION_ERRORS,
    headers=(SESSION_ID,),
    examples={
        "text": Example("A text", {"prompt": "Hello, world", "max_tokens": 8, "logprobs": 1}),
        "ids": Example(
            "Ids, with the ids of the completion",
            {"prompt": [42, 1393, 14], "max_tokens": 8, "return_token_ids": True},
        ),
        "stream": Example(
            "A stream",
            {
                "prompt": "Hello",
                "max_tokens": 4,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
    },
)
def completions() -> Response:
    """Text or ids in, text out."""
    return complete_text(_respond)


def complete_text(answer: Answer) -> Response:
    """Checks a body of /v1/completions and answers it by `answer`."""
    with admitted(COMPLETIONS_BODY) as (call, (fields, options)):
        call.identify(fields.request_id, fields.session_id)
        adapter = call.adapter_named(fields.model)
        options.logprobs = fields.num_logprobs
        if fields.echo and options.prompt_logprobs is None:
            options.prompt_logprobs = options.logprobs
        options.max_tokens = fields.max_completion_tokens or options.max_tokens
        check_sampling(options, call.facts)
        prompts = _completions_prompts(call, fields, options.n)
        return answer(
            OpenAIRequest(
                call,
                fields,
                options,
                prompts=prompts,
                texts=_token_texts(call, fields, options),
                shows_prompt_ids=fields.return_token_ids,
                adapter=adapter,
                echoed=_texts_of(call, fields, prompts) if fields.echo else (),
            )
        )


@blueprint.post("/v1/chat/completions/")
@_of_chat(
    description=STREAMS,
    examples={
        "question": Example(
            "A question, with ids and log-probabilities",
            {
                "messages": QUESTION,
                "max_tokens": 8,
                "logprobs": True,
                "top_logprobs": 2,
                "return_token_ids": True,
                "return_weight_versions": True,
            },
        ),
        "stream": Example("A stream", {"messages": QUESTION, "max_tokens": 4, "stream": True}),
    },
)
def chat_completions() -> Response:
    """Messages in, a message out."""
    return complete_chat(_respond)


@blueprint.post("/v1/chat/completions/tokens/")
@_of_chat(
    description=f"The engine gets exactly `tokens`. {STREAMS}",
    examples={
        "ids": Example(
            "Ids with the messages that they stand for",
            {"messages": QUESTION, "tokens": [42, 1393, 14], "max_tokens": 8},
        )
    },
)
def chat_completions_of_tokens() -> Response:
    """The prompt's ids and messages in, a message out."""
    return complete_chat(_respond, takes_tokens=True)


def complete_chat(answer: Answer, *, takes_tokens: bool = False) -> Response:
    """Checks a chat's body and answers it by `answer`."""
    with admitted(CHAT_COMPLETIONS_BODY) as (call, (fields, options)):
        call.identify(fields.request_id, fields.session_id)
        adapter = call.adapter_named(fields.model)
        if takes_tokens != (fields.tokens is not None):
            raise InvalidRequest(
                "tokens: expected the prompt's ids on /v1/chat/completions/tokens and none on "
                f"/v1/chat/completions, got {'none' if takes_tokens else 'ids'}; use the other route",
                param="tokens",
            )
        limit = fields.max_completion_tokens
        options.max_tokens = fields.max_tokens if limit is None else limit
        options.logprobs = fields.top_logprobs if fields.logprobs else None
        check_sampling(options, call.facts)
        call.check_num_completions(1, options.n, "n")
        tools = read_tools(fields, call.facts)
        return answer(
            OpenAIRequest(
                call,
                fields,
                options,
                prompts=[prompt_of_chat(call, fields, tools)],
                texts=_token_texts(call, fields, options),
                shows_prompt_ids=fields.return_token_ids or takes_tokens,
                adapter=adapter,
                chat=tools.parsing,
            )
        )


def _respond(request: OpenAIRequest) -> Response:
    call, fields = request.call, request.fields
    pending = call.make_request(
        request.prompts,
        request.options,
        is_streamed=fields.stream,
        adapter=request.adapter,
        chat=request.chat,
        min_weight_version=fields.min_weight_version,
    )
    events = OpenAIEvents(request) if fields.stream else None
    return respond(call, pending, whole=partial(whole_answer, request), events=events)


def _token_texts(call: Call, fields: RouteFields, options: SamplingOptions) -> TokenTexts | None:
    if options.logprobs is None and options.prompt_logprobs is None:
        return None
    as_ids = fields.return_tokens_as_token_ids
    # With ids, only chats (`bytes`) and prompts (`decoded_token`) still show texts.
    needs_texts = (
        not as_ids or isinstance(fields, ChatFields) or options.prompt_logprobs is not None
    )
    return TokenTexts(call, as_ids=as_ids, needs_texts=needs_texts)


def _completions_prompts(call: Call, fields: CompletionsFields, n: int) -> list[Prompt]:
    if fields.mm_processor_kwargs:
        raise InvalidRequest(
            "mm_processor_kwargs: expected none, as this route takes no images; use /generate/",
            param="mm_processor_kwargs",
        )
    prompts, is_single = _split_prompts(fields.prompt)
    call.check_num_completions(len(prompts), n, "prompt")
    locations = ["prompt" if is_single else f"prompt[{index}]" for index in range(len(prompts))]
    if call.turn is not None:
        ids = _prompt_in_session(call, call.turn, fields, prompts)
        return [check_prompt(ids, locations[0], call.facts, cache_salt=fields.cache_salt)]
    if isinstance(prompts[0], str):
        prompts = call.encode(prompts, locations, with_special_tokens=fields.add_special_tokens)
    else:
        # Lists of ids take ten times the memory of the prompts. That they were lists still shows.
        fields.prompt = [[]]
    return [
        check_prompt(ids, location, call.facts, cache_salt=fields.cache_salt)
        for ids, location in sharing_time(zip(prompts, locations, strict=True))
    ]


def _prompt_in_session(
    call: Call, turn: SessionTurn, fields: CompletionsFields, prompts: list[Any]
) -> np.ndarray:
    """The ids of the one prompt of a request in a session."""
    if len(prompts) > 1:
        raise InvalidRequest(
            f"prompt: expected one in a session, got {len(prompts)}; send one request for each",
            param="prompt",
        )

    def encode(rest: bytes, is_whole: bool) -> list[int]:
        with_special = fields.add_special_tokens and is_whole
        (ids,) = call.encode([rest.decode()], ["prompt"], with_special_tokens=with_special)
        return ids

    def decode(ids: np.ndarray) -> str:
        (text,) = call.use_tokenizer(decode_all, [ids.tolist()], size=len(ids))
        return text

    if isinstance(prompts[0], str):
        return turn.prompt_of_raw(TEXT, prompts[0].encode(), encode, decode)
    sent = np.array(prompts[0], np.int32).tobytes()
    return turn.prompt_of_raw(IDS, sent, lambda rest, _: np.frombuffer(rest, np.int32), decode)


def _texts_of(call: Call, fields: CompletionsFields, prompts: Sequence[Prompt]) -> list[str]:
    """The text of each prompt: as the client sent it, else of its ids."""
    sent, _ = _split_prompts(fields.prompt)
    if isinstance(sent[0], str):
        return sent
    all_ids = [prompt.token_ids.tolist() for prompt in prompts]
    return call.use_tokenizer(decode_all, all_ids, size=sum(map(len, all_ids)))


def _split_prompts(prompt: str | list[Any] | np.ndarray) -> tuple[list[Any], bool]:
    """The prompts, all texts or all lists of ids, and whether the body had one outside a list."""
    if isinstance(prompt, str | np.ndarray):
        return [prompt], True
    kinds = {list if isinstance(one, np.ndarray) else type(one) for one in prompt}
    if len(kinds) != 1:
        raise InvalidRequest(
            "prompt: expected a text, ids, a list of texts or a list of lists of ids, got "
            f"{' and '.join(sorted(kind.__name__ for kind in kinds)) or 'an empty list'}",
            param="prompt",
        )
    return ([prompt], True) if kinds == {int} else (prompt, False)
