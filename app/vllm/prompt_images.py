"""Turns `features` and `content_parts` of a body into checked image files."""

import dataclasses

from app.inputs.features import IMAGE_PREFIX, PlaceholderRange, hash_of
from app.inputs.images import EncodedImages, PromptImages, in_image_thread, read_images
from app.vllm.bodies import GenerateFields
from titopool.errors import InvalidImage, InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.wire.messages import WorkerFacts

LISTS = ("mm_hashes", "mm_placeholders", "kwargs_data")


def images_of_tokens(
    fields: GenerateFields, facts: WorkerFacts, config: ServerConfig
) -> PromptImages:
    """The images of a body with token ids; those of `features` with their ranges in the prompt.

    A worker checks whether a range is as long as its image needs.

    Raises:
        InvalidRequest: the features are not those that a render returns, their lists are not
            parallel, or a range is outside the prompt or overlaps another one.
        TitopoolError: as `read_images`.
    """
    features = fields.features
    if features is None:
        urls = [part.url for part in fields.content_parts or ()]
        return _read(urls, "content_parts", fields, facts, config)
    hashes, ranges = features.mm_hashes.image, features.mm_placeholders.image
    data = features.kwargs_data.image if features.kwargs_data else [None] * len(hashes)
    _check_lengths(len(hashes), len(ranges), len(data))
    _check_ranges(ranges, len(fields.token_ids))
    location = "features.kwargs_data.image"
    files = [_file_in(one, f"{location}[{index}]") for index, one in enumerate(data)]
    images = _read(files, location, fields, facts, config)
    for index, (given, image) in enumerate(zip(hashes, images.images, strict=True)):
        expected = in_image_thread(hash_of, image.data, size=len(image.data))
        if given != expected:
            raise _wrong(
                f"features.mm_hashes.image[{index}]: expected {expected}, the sha256 of the file in "
                f"kwargs_data, got {given[:64]!r}; send both lists as the render returned them"
            )
    return dataclasses.replace(images, ranges=[(one.offset, one.length) for one in ranges])


def _read(
    files: list[str],
    location: str,
    fields: GenerateFields,
    facts: WorkerFacts,
    config: ServerConfig,
) -> PromptImages:
    kwargs = fields.mm_processor_kwargs or {}
    encoded = EncodedImages("token_ids", location, files, True, kwargs)
    return read_images(encoded, facts, config)


def _check_lengths(*lengths: int) -> None:
    if len(set(lengths)) > 1:
        got = ", ".join(f"{n} in {name}" for n, name in zip(lengths, LISTS, strict=True))
        raise _wrong(f"features: expected an entry for each image in every list, got {got}")


def _check_ranges(ranges: list[PlaceholderRange], num_tokens: int) -> None:
    end = 0
    for index, one in enumerate(ranges):
        location = f"features.mm_placeholders.image[{index}]"
        shown = f"got offset {one.offset} and length {one.length}"
        if one.offset < end:
            raise _wrong(
                f"{location}: expected an offset of at least {end}, where the range before ends, {shown}; "
                "send the images in the prompt's order, each with its own placeholders"
            )
        end = one.offset + one.length
        if end > num_tokens:
            raise _wrong(
                f"{location}: expected a range within the {num_tokens} tokens of token_ids, {shown}; "
                "send the ids with expanded placeholders"
            )


def _file_in(data: str | None, location: str) -> str:
    """The file in base64."""
    if data is None or not data.startswith(IMAGE_PREFIX):
        got = "null" if data is None else repr(data[:40])
        raise InvalidImage(
            f"{location}: expected {IMAGE_PREFIX} and an image's file in base64, as this server's "
            f"/v1/chat/completions/render returns it, got {got}; this server takes no tensors and keeps "
            "no images: render the message here, or send content_parts",
            param="features",
        )
    return data.removeprefix(IMAGE_PREFIX)


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="features")
