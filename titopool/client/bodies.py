"""The bodies and headers that the clients send. No IO."""

import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

import msgspec
import numpy as np

from titopool.errors import InvalidRequest

# Options with a field of their own; all others are SamplingParams fields in `generation_kwargs`.
FIELDS = {
    "mm_processor_kwargs", "top_p", "top_k", "min_p", "repetition_penalty", "truncate_prompt_tokens",
    "structured_outputs_regex", "raw_logprobs",
}  # fmt: skip
# What PNG files can hold; other images are sent in RGB, as the server reads them.
PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}
# As `app/http/request_ids.py` takes them.
_USABLE_ID = re.compile(r"[!-~]{1,256}")


class Options(NamedTuple):
    """What `generate` and `chat` share."""

    n: int
    max_tokens: int
    temperature: float
    logprobs: int | None
    lora_name: str | None
    min_weight_version: int | None
    sampling: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """The body's fields."""
        own = {name: one for name, one in self._asdict().items() if name != "sampling"}
        named = {name: one for name, one in self.sampling.items() if name in FIELDS}
        others = {name: one for name, one in self.sampling.items() if name not in FIELDS}
        return {**own, **named, "generation_kwargs": others}


@dataclass(frozen=True)
class Batch:
    """Prompts or conversations that may be sent in one request, or in several."""

    path: str
    # The body's field of `items`.
    name: str
    items: list[Any]
    options: Options
    # The body's other fields.
    others: dict[str, Any] = field(default_factory=dict)
    # One entry for each item; None: no images.
    images: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def body(self, start: int, stop: int) -> bytes:
        """The JSON body of items [start, stop)."""
        fields = {**self.options.fields(), **self.others}
        kwargs = fields.get("mm_processor_kwargs")
        if isinstance(kwargs, list) and len(kwargs) == len(self):
            fields["mm_processor_kwargs"] = kwargs[start:stop]
        if self.images is not None:
            fields["images"] = self.images[start:stop]
        return json_body({**fields, self.name: self.items[start:stop]})

    def sent_ids(self, start: int, stop: int) -> list[np.ndarray | None]:
        """int32, [tokens], of each item that is token ids."""
        return [_ids_of(one) if self.name == "prompts" else None for one in self.items[start:stop]]

    def moved(self, text: str, start: int) -> str:
        """An error's text about items from `start` on, with the locations of the whole batch."""
        return re.sub(
            rf"\b({self.name}|images|mm_processor_kwargs)\[(\d+)\]",
            lambda found: f"{found[1]}[{int(found[2]) + start}]",
            text,
        )


def prompts_batch(prompts: Any, images: Any, options: Options) -> Batch:
    """The batch of `Client.generate`.

    Raises:
        InvalidRequest: the prompts are of no known kind, or images do not fit their number.
    """
    if _is_one_prompt(prompts):
        prompts, images = [prompts], None if images is None else [images]
    items = [_prompt(one) for one in prompts]
    if images is None:
        return Batch("/generate/", "prompts", items, options)
    if not isinstance(images, Sequence) or len(images) != len(items):
        came = len(images) if isinstance(images, Sequence) else type(images).__name__
        raise InvalidRequest(
            f"images: expected a list with one entry for each of {len(items)} prompts, got {came}; "
            "an entry is a list of images, an image or None",
            param="images",
        )
    return Batch("/generate/", "prompts", items, options, images=[_images(one) for one in images])


def chats_batch(
    conversations: Any, tools: Any, chat_template_kwargs: Mapping[str, Any] | None, options: Options
) -> Batch:
    """The batch of `Client.chat`: a conversation, or a list of them.

    Raises:
        InvalidRequest: an image cannot be encoded.
    """
    one = isinstance(conversations, Sequence) and conversations
    is_single = bool(one) and isinstance(conversations[0], Mapping)
    chats = [conversations] if is_single else conversations
    others = {"tools": tools, "chat_template_kwargs": dict(chat_template_kwargs or {})}
    return Batch("/chat/", "messages", [messages_of(one) for one in chats], options, others)


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with its images in base64."""
    return [{**one, "content": _content(one["content"])} if "content" in one else dict(one)
            for one in messages]  # fmt: skip


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation of `messages_of` has images."""
    return any(
        str(part.get("type")).startswith("image")
        for one in messages
        if isinstance(one.get("content"), list)
        for part in one["content"]
        if isinstance(part, dict)
    )


def ids_list(ids: Any) -> list[int]:
    """Token ids as JSON has them: of a list, a tuple or an array."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def json_body(fields: Mapping[str, Any]) -> bytes:
    """A JSON body.

    Raises:
        InvalidRequest: JSON has no such value. NaN and infinity are named by their place: they would
            be null, which leaves an option out.
    """
    try:
        place = _place_of_non_finite(fields, "")
        if place is not None:
            raise InvalidRequest(
                f"{place}: expected a finite number, as JSON has no other, got NaN or infinity; "
                "send a number, or leave the field out",
                param=re.split(r"[.[]", place)[0],
            )
        return msgspec.json.encode(fields, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"expected values that JSON has, got others: {error}") from None


def headers_of(request_id: str | None, session_id: str | None, key: str | None) -> dict[str, str]:
    """The headers of one generating request.

    Raises:
        InvalidRequest: an id is not one that a header can have.
    """
    headers = {}
    for name, field_name, given in (
        ("X-Request-Id", "request_id", request_id),
        ("X-Session-ID", "session_id", session_id),
        ("Idempotency-Key", "idempotency_key", key),
    ):
        if given is None:
            continue
        if not (isinstance(given, str) and _USABLE_ID.fullmatch(given)):
            raise InvalidRequest(
                f"{field_name}: expected 1 to 256 printable ASCII characters without blanks, got "
                f"{given!r}",
                param=field_name,
            )
        headers[name] = given
    return headers


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    if hasattr(prompts, "ndim"):
        return bool(prompts.ndim == 1)
    return bool(prompts) and isinstance(prompts[0], int | np.integer)


def _prompt(given: Any) -> Any:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return _tokens_prompt(given)
    if hasattr(given, "tolist") or isinstance(given, Sequence):
        return ids_list(given)
    raise InvalidRequest(
        "prompts: expected text, token ids or an object with prompt_token_ids, got "
        f"{type(given).__name__}",
        param="prompts",
    )


def _tokens_prompt(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's TokensPrompt with its ids as a list and its images in base64."""
    prompt = dict(given)
    if "prompt_token_ids" in prompt:
        prompt["prompt_token_ids"] = ids_list(prompt["prompt_token_ids"])
    data = prompt.get("multi_modal_data")
    if data and data.get("image") is not None:
        prompt["multi_modal_data"] = {**data, "image": _images(data["image"])}
    return prompt


def _ids_of(item: Any) -> np.ndarray | None:
    ids = item.get("prompt_token_ids") if isinstance(item, dict) else item
    return np.array(ids, np.int32) if isinstance(ids, list) else None


def _images(given: Any) -> list[str] | None:
    if given is None:
        return None
    several = isinstance(given, list | tuple)
    return [image_base64(one) for one in (given if several else [given])]


def image_base64(image: Any) -> str:
    """A PIL image as PNG, the bytes of a file, or a text (base64 or a data: URL) as it is.

    Raises:
        InvalidRequest: it is none of these.
    """
    if isinstance(image, str):
        return image
    if isinstance(image, bytes | bytearray | memoryview):
        return b64encode(image).decode()
    if not hasattr(image, "save"):
        raise InvalidRequest(
            f"images: expected a PIL image, a file's bytes or base64, got {type(image).__name__}",
            param="images",
        )
    file = BytesIO()
    kept = image if image.mode in PNG_MODES else image.convert("RGB")
    # The fastest level: the file travels once.
    kept.save(file, format="PNG", compress_level=1)
    return b64encode(file.getvalue()).decode()


def _content(content: Any) -> Any:
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    return [_part(one) for one in content]


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_pil") or isinstance(part.get(kind), str | None):
        return part
    return {**part, kind: image_base64(part[kind])}


def _plain(value: Any) -> Any:
    """numpy's and torch's numbers and arrays as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not of JSON")


# NumPy's kinds of dtypes, what a list of ids, or of texts, begins with, and how many are many.
WHOLE_KINDS, WHOLE, MANY = "iub", (int, str, np.integer), 64


def _place_of_non_finite(value: Any, place: str) -> str | None:
    """Where `value` has the first number that is not finite, as errors of the server name places."""
    if hasattr(value, "tolist"):
        if getattr(getattr(value, "dtype", None), "kind", "") in WHOLE_KINDS:
            return None
        value = value.tolist()
    if isinstance(value, float):
        return None if math.isfinite(value) else place
    if isinstance(value, Mapping):
        # Options of the sampler are arguments of their own here.
        named = place + "." if place and place != "generation_kwargs" else ""
        parts = ((f"{named}{name}", one) for name, one in value.items())
    elif isinstance(value, list | tuple) and not (
        # Ids are many, and the server refuses one that is null.
        len(value) > MANY and isinstance(value[0], WHOLE)
    ):
        parts = ((f"{place}[{index}]", one) for index, one in enumerate(value))
    else:
        return None
    found = (_place_of_non_finite(one, name) for name, one in parts)
    return next((one for one in found if one is not None), None)


def pieces(num_items: int, num_pieces: int) -> Iterator[tuple[int, int]]:
    """Cuts `num_items` into at most `num_pieces` ranges of nearly the same length."""
    size = max(1, -(-num_items // num_pieces))
    return ((start, min(start + size, num_items)) for start in range(0, num_items, size))
