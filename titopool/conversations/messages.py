"""Messages as chat templates take them, and the images in them."""

from collections.abc import Iterable, Sequence
from typing import Any

from titopool.client.bodies import image_base64
from titopool.conversations.interface import Image, Message

IMAGE_PART = {"type": "image"}


def read_messages(
    messages: Iterable[Message], images: Sequence[Image] | None = None
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Messages whose image parts are `{"type": "image"}`, and the images in base64, in order.

    An image part holds its image (`{"type": "image", "image": …}`, also under `image_pil` or
    `image_url`), or is bare and takes the next one of `images`.

    Raises:
        ValueError: `images` are more or fewer than the bare parts.
    """
    found: list[str] = []
    spare = list(images or ())
    read = tuple(_read_message(message, found, spare) for message in messages)
    if spare:
        raise ValueError(
            f"images: expected one for each image part without an image of its own, got "
            f"{len(spare)} too many"
        )
    return read, tuple(found)


def with_images(messages: Iterable[Message], images: Sequence[str]) -> list[Message]:
    """The messages with the images inside, as the server's routes take them."""
    rest = iter(images)
    filled: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                {"type": "image", "image": next(rest)} if part == IMAGE_PART else part
                for part in content
            ]
            message = {**message, "content": parts}
        filled.append(message)
    return filled


def image_file(image: Image) -> str:
    """The image as a file in base64; a PIL image becomes a PNG."""
    text = image_base64(image)
    return text.partition(",")[2] if text.startswith("data:") else text


def _read_message(message: Message, found: list[str], spare: list[Image]) -> Message:
    if "role" not in message:
        raise ValueError(f"messages: expected a role in each, got {sorted(message)}")
    read = dict(message)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        read["content"] = [_read_part(part, found, spare) for part in content]
    elif content is None:
        read["content"] = ""
    return read


def _read_part(part: Any, found: list[str], spare: list[Image]) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = str(part.get("type"))
    if not kind.startswith("image"):
        return part
    image = part.get(kind)
    if isinstance(image, dict):
        image = image.get("url")
    if image is None:
        if not spare:
            raise ValueError("images: expected one for each image part, got too few")
        image = spare.pop(0)
    found.append(image_file(image))
    return IMAGE_PART
