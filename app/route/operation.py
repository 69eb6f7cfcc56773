"""What a handler says of its route, beside its paths, its methods and its docstring."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from flask import request

from app.http.responses import json_response
from app.route.decoding import Decoder, decode_body
from titopool.errors import (
    AnswerTooLarge,
    BodyTooLarge,
    BodyTooSlow,
    ClientGone,
    Conflict,
    DeadlinePassed,
    GenerationFailed,
    ImageMismatch,
    InvalidImage,
    InvalidRequest,
    ModelChanged,
    ModelNotFound,
    NoReadyWorker,
    PromptTooLong,
    QueueFull,
    TitopoolError,
    WeightsLost,
    WeightUpdateFailed,
)

JSON = "application/json"
MSGPACK = "application/msgpack"
EVENTS = "text/event-stream"
STREAMS = "With `stream`, the answer is events; `[DONE]` ends them."
# A JSON Schema.
BOOLEAN = {"type": "boolean"}
# Of examples.
QUESTION = [{"role": "user", "content": "What is 6 times 7?"}]

Errors = tuple[type[TitopoolError], ...]
# Of every route with a body.
BODY_ERRORS: Errors = (InvalidRequest, BodyTooSlow, BodyTooLarge, QueueFull)
# Of every route that asks for the model.
MODEL_ERRORS: Errors = (NoReadyWorker, ModelNotFound)
# Of every route that runs jobs at workers.
GENERATION_ERRORS: Errors = (
    *MODEL_ERRORS, PromptTooLong, Conflict, ClientGone, GenerationFailed, WeightsLost, ModelChanged,
    DeadlinePassed, AnswerTooLarge,
)  # fmt: skip
IMAGE_ERRORS: Errors = (InvalidImage, ImageMismatch)
# Of every route that sends commands to workers.
COMMAND_ERRORS: Errors = (Conflict, NoReadyWorker, WeightUpdateFailed, DeadlinePassed)


class Query(NamedTuple):
    """A parameter of the URL's query."""

    name: str
    # A JSON Schema.
    schema: dict[str, Any]
    description: str


class Example(NamedTuple):
    """A request that works, and is sent by a test (`tests/stub/http/test_openapi_examples.py`)."""

    summary: str
    body: Any = None


Handler = Callable[..., Any]
Answer = TypeVar("Answer", bound=msgspec.Struct)


class Reply(NamedTuple, Generic[Answer]):
    """An answer with a status of its own, which a handler returns in place of the struct."""

    body: Answer
    status: int


def _structs_of(answer: Any) -> tuple[type[msgspec.Struct], ...]:
    """The structs in a handler's return type: one, one of several, or of a `Reply`; empty: none."""
    if inspect.isclass(answer) and issubclass(answer, msgspec.Struct):
        return (answer,)
    parts = get_args(answer) if get_origin(answer) in (UnionType, Reply) else ()
    return tuple(struct for one in parts for struct in _structs_of(one))


def _one_or_all(structs: tuple[Any, ...]) -> Any:
    return structs[0] if len(structs) == 1 else structs


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The description of one handler, at all of its paths and methods; decorates the handler.

    The first line of the handler's docstring is the summary, and what follows, up to `Args`, `Returns`
    or `Raises`, begins the description. A handler with the parameter `body` gets the body, decoded to
    the parameter's type; others decode it themselves: when they are admitted (`app.call.call.admitted`), or
    because it has several forms or its errors another shape. A struct that a handler returns, alone or
    in a `Reply`, is the answer, encoded.
    """

    # The type of the answer, or a tuple of several; None: the type that the handler returns, if that is
    # a struct, or the answer has no body.
    answer: Any = None
    # The decoder that the handler uses, or several for different forms; None: that of the type of the
    # handler's parameter `body`, or a body is ignored.
    body: Decoder[Any] | tuple[Decoder[Any], ...] | None = None
    # Whether the handler accepts a request without a body.
    is_body_optional: bool = False
    # "": the first line of the handler's docstring.
    summary: str = ""
    # What the schemas cannot say.
    description: str = ""
    # The status of `answer`.
    status: int = 200
    # Whether the handler only says why there is no such route.
    is_refused: bool = False
    # Types of answers with other statuses, which are no errors.
    other_answers: Mapping[int, Any] = field(default_factory=dict)
    # Types of answers in other media types, of the same status.
    other_media: Mapping[str, Any] = field(default_factory=dict)
    # The media type of `answer`.
    media_type: str = JSON
    # Beyond those of every route (`app/route/error_schemas.py`) and of every route with a body.
    errors: Errors = ()
    # Statuses after which TRL's client repeats a call are 409 (`app/vllm_rl/statuses.py`).
    is_never_repeated: bool = False
    # Every error is a 400 with SGLang's fields; the type of its body.
    failure: Any = None
    # The type of the body of all other errors; None: the server's own.
    error: Any = None
    # Of parts of the path: their meaning, by name.
    path_parts: Mapping[str, str] = field(default_factory=dict)
    query: tuple[Query, ...] = ()
    # Names in `app.route.parameters.HEADERS`.
    headers: tuple[str, ...] = ()
    # By name.
    examples: Mapping[str, Example] = field(default_factory=dict)

    def __call__(self, handler: Handler) -> Handler:
        """`handler` with this description, and with its body decoded and its answer encoded."""
        types = inspect.get_annotations(handler)
        decoder = msgspec.json.Decoder(types["body"]) if "body" in types else None
        structs = _structs_of(types["return"])
        if (decoder and self.body) or (structs and self.answer):
            raise TypeError(
                f"{handler.__name__}: expected a type of the body and of the answer, got two of one"
            )
        described = handler
        if decoder or structs:
            missing = b"{}" if self.is_body_optional else b""

            @functools.wraps(handler)
            def described(**parts: Any) -> Any:
                if decoder:
                    parts["body"] = decode_body(request.get_data() or missing, decoder)
                found, status = handler(**parts), self.status
                if isinstance(found, Reply):
                    found, status = found
                return json_response(found, status) if structs else found

        vars(described)["operation"] = replace(
            self, body=decoder or self.body, answer=_one_or_all(structs) if structs else self.answer
        )
        return described

    @property
    def decoders(self) -> tuple[Decoder[Any], ...]:
        """Those of the body's forms; empty: a body is ignored."""
        if self.body is None:
            return ()
        return self.body if isinstance(self.body, tuple) else (self.body,)
