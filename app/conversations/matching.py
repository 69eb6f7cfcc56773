"""Recognizes the messages of a request as those of turns before.

A digest stands for a conversation up to each of its messages, so one look into the store finds the
longest known beginning. Messages that were sampled are compared by what they say: clients drop
thoughts, trim blanks, reorder the keys of arguments and rename the ids of calls.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate, groupby, takewhile
from typing import Any

import msgspec

from app.inputs.chat_template import Chat
from app.route.fields import Message
from app.time_slices import sharing_time
from titopool.conversations.chat_template import Arguments, text_of
from titopool.conversations.turns import THOUGHTS, squeezed

DIGEST_BYTES = 16
# The greatest integer that JavaScript has.
MAX_INTEGER = 2**53
SYSTEM_ROLES = ("system", "developer")


def context_of(chat: Chat, mm_processor_kwargs: dict[str, Any], model: str) -> bytes:
    """A digest of what stands beside the messages: the model, tools, variables of the template, and
    arguments of the image processor, which decide how many tokens an image has."""
    return _digest(b"", _encoded([model, chat.tools, chat.template_kwargs, mm_processor_kwargs]))


def says(messages: Sequence[Message], images: Sequence[bytes]) -> list[bytes]:
    """What each message says, in a form that is equal for equal ones.

    Args:
        messages: as `read_conversation` returns them.
        images: digests of the images, in order.
    """
    found = list[bytes]()
    rest, num_calls, calls = iter(images), 0, dict[str, int]()
    for message in sharing_time(messages):
        if message["role"] == "assistant":
            for call in message.get("tool_calls") or ():
                # Results name the call by an id that the client may have changed.
                calls[str(call.get("id"))] = num_calls
                num_calls += 1
            found.append(_turn_says(message))
        else:
            name = str(message.get("tool_call_id"))
            known = [message["role"], message.get("name"), calls.get(name, name)]
            found.append(_encoded([*known, _shown(message, rest)]))
    return found


def links_of(context: bytes, said: Sequence[bytes]) -> list[bytes]:
    """A digest of the conversation up to each message, of what the messages say (`says`)."""
    return list(accumulate(said, _digest, initial=context))[1:]


def link_of_turn(link: bytes, message: Message) -> bytes:
    """A digest of the conversation `link` with a message of the assistant."""
    return _digest(link, _turn_says(message))


def _turn_says(message: Message) -> bytes:
    called = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        called.append([function.get("name"), _arguments_of(function.get("arguments"))])
    return _encoded([squeezed(said_of(text_of(message.get("content")))), called])


def num_system(messages: Sequence[Message]) -> int:
    """How many messages at the beginning are the system's."""
    return sum(1 for _ in takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))


def system_of(messages: Sequence[Message]) -> bytes:
    """A digest of the system prompt at the beginning."""
    return _digest(
        b"",
        _encoded([text_of(one.get("content")).strip() for one in messages[: num_system(messages)]]),
    )


def _shown(message: Message, images: Iterator[bytes]) -> list[str]:
    """Texts and digests of images, in their order; texts that follow each other are one."""
    shown = list[str]()
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for is_text, alike in groupby(parts, lambda part: part["type"] == "text"):
        if is_text:
            shown.append(text_of([*alike]).strip())
        else:
            shown += [f"image {next(images, b'').hex()}" for _ in alike]
    return shown


def said_of(text: str) -> str:
    """A text without the thought that it begins with, whose opening may stand in the prompt."""
    for begin, end in THOUGHTS.items():
        before, found, after = text.partition(end)
        if text.lstrip().startswith(begin) or (found and begin not in before and after[:1] in "\n"):
            return after
    return text


def _arguments_of(sent: Any) -> Any:
    """The arguments of a call, equal for equal values; what is no object counts as it was written."""
    if isinstance(sent, Arguments) and not sent:
        written = squeezed(sent.sent or "")
        return {} if written in ("", "{}") else written
    return _as_javascript(sent)


def _as_javascript(value: Any) -> Any:
    """A value as JavaScript reads and writes it: 1.0 is 1, and integers have 53 bits."""
    if isinstance(value, dict):
        return {name: _as_javascript(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_as_javascript(one) for one in value]
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        with suppress(OverflowError):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


# Models write numbers that orjson refuses.
_encoded = msgspec.json.Encoder(enc_hook=repr, order="deterministic").encode


def _digest(link: bytes, said: bytes) -> bytes:
    return blake2b(link + said, digest_size=DIGEST_BYTES).digest()
