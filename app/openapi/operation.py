"""What the description of a route says beyond its path, its methods and its handler's docstring."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from app.schemas.decoding import Decoder
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
    """A request that works, and is sent by a test (`tests/openapi/test_examples.py`)."""

    summary: str
    body: Any = None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The description of one handler, at all of its paths and methods."""

    tag: str
    # The type of the answer, or a tuple of several; None: the answer has no body.
    answer: Any = None
    # The decoder that the handler uses, or several for different forms; None: a body is ignored.
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
    # Beyond those of every route (`app/openapi/errors.py`) and of every route with a body.
    errors: Errors = ()
    # Statuses after which TRL's client repeats a call are 409 (`app/routes/vllm_rl/statuses.py`).
    never_repeated: Literal["no", "yes"] = "no"
    # Every error is a 400 with SGLang's fields; the type of its body.
    failure: Any = None
    # Of parts of the path: their meaning, by name.
    path_parts: Mapping[str, str] = field(default_factory=dict)
    query: tuple[Query, ...] = ()
    # Names in `app.openapi.parameters.HEADERS`.
    headers: tuple[str, ...] = ()
    # By name.
    examples: Mapping[str, Example] = field(default_factory=dict)

    @property
    def decoders(self) -> tuple[Decoder[Any], ...]:
        """Those of the body's forms; empty: a body is ignored."""
        if self.body is None:
            return ()
        return self.body if isinstance(self.body, tuple) else (self.body,)
