"""What a worker sends to a helper that parses, and what it gets back; MessagePack."""

from typing import Any

import msgspec


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """A job whose completions come next; before its first piece, and again after a helper's end."""

    job: int
    # `ChatParsing` and `SamplingOptions`, encoded.
    chat: bytes
    sampling: bytes
    is_streamed: bool
    # int32.
    prompt_token_ids: bytes
    # For log lines.
    request: str


class Past(msgspec.Struct, frozen=True, array_like=True, tag="past"):
    """What another helper has parsed of a streamed completion."""

    job: int
    index: int
    # Text and int32 ids of each step of the parser, as it was.
    steps: list[tuple[str, bytes]]
    # Of pieces that no step has taken yet.
    held: list[tuple[str, bytes]]
    # Whether its parsing has ended: the rest is plain text.
    is_over: bool


class Piece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """What a completion has gained; of a job that is not streamed, all of it."""

    job: int
    index: int
    text: str
    # int32.
    token_ids: bytes
    # Empty: it goes on.
    finish_reason: str


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """A job of which nothing more comes."""

    job: int


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Of a piece, in the order of pieces."""

    # In OpenAI's nesting: the message of a whole completion, the delta of a streamed one.
    message: dict[str, Any]
    finish_reason: str
    # Of the parser: none, if the piece waits for the next one; one; or two, if what waited came first.
    num_steps: int = 1
    # Whether the completion's parsing ends here.
    is_over: bool = False


Batch = list[Begin | Past | Piece | End]
decode_batch = msgspec.msgpack.Decoder(Batch).decode
# None: the helper had no time for the piece.
decode_outcomes = msgspec.msgpack.Decoder(list[Outcome | None]).decode
encode = msgspec.msgpack.Encoder().encode
