"""Prompts with images: decoded, processed and placed, each image exactly once.

vLLM replaces the first placeholder of each image by as many as the image needs, also where
the client's processor had done so before, and looks for placeholders that it does not find in
decoded text. Here its processor is told where the images are instead: expanded placeholders
stay as they are, single ones are expanded, what fits neither is refused, and token ids are
never decoded. It works in threads, so that text prompts do not wait for it.

Everything of vLLM and torch is imported inside functions, as in `workers/engine.py`.
"""

import asyncio
import copy
import logging
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from titopool.errors import ImageMismatch, InvalidImage, PromptTooLong
from titopool.messages import ImageFacts, Job

logger = logging.getLogger(__name__)

# What the front ends check before, with a limit of their own.
PIL.Image.MAX_IMAGE_PIXELS = None
# Of the image that the processor is tried with at start.
TRIAL_SIZE = (64, 64)
# Numbers of a message.
MAX_SHOWN = 8

TokenIds = list[int]
# vLLM's: for each modality, for each item, the alternatives of what to put where.
Updates = Mapping[str, Sequence[Sequence[Any]]]
Found = Mapping[str, list[Any]]


class Prepared(NamedTuple):
    """A prompt that the engine takes as it is, and the time that one thread needed for it."""

    engine_input: Any
    elapsed_s: float


class ImagePreparer:
    """Makes engine inputs of prompts with images, in threads of its own."""

    def __init__(self, model_config: Any, tokenizer: Any, num_threads: int):
        import torch

        # There are as many threads as there shall be.
        torch.set_num_threads(1)
        self._max_model_len = model_config.max_model_len
        # A tokenizer is not safe to share between threads: each has a processor of its own.
        self._free: queue.SimpleQueue[PlacingProcessor] = queue.SimpleQueue()
        first = PlacingProcessor(model_config, tokenizer)
        self.facts = first.learn()
        self._free.put(first)
        for _ in range(num_threads - 1):
            self._free.put(PlacingProcessor(model_config, tokenizer, first.placeholder_ids))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="images")

    async def prepare(self, job: Job) -> Prepared:
        """`job` as vLLM's multi-modal input.

        Raises:
            InvalidImage: an image cannot be decoded, or the model's processor refuses it.
            ImageMismatch: images and placeholders do not fit together.
            PromptTooLong: there is no room left once the placeholders are expanded.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._prepare, job)

    def _prepare(self, job: Job) -> Prepared:
        begin = time.monotonic()
        images = [_decode(image.data, number) for number, image in enumerate(job.images)]
        processor = self._free.get()
        try:
            engine_input = processor.apply(
                np.frombuffer(job.prompt_token_ids, dtype=np.int32).tolist(),
                images,
                [image.digest.hex() for image in job.images],
                job.mm_processor_kwargs,
            )
        finally:
            self._free.put(processor)
        num_tokens = len(engine_input["prompt_token_ids"])
        if num_tokens >= self._max_model_len:
            raise PromptTooLong(
                f"expected at most {self._max_model_len - 1} tokens with its images expanded, one "
                f"less than the model's {self._max_model_len} (max_model_len), got {num_tokens}; "
                "send fewer or smaller images (mm_processor_kwargs.max_pixels), or less text"
            )
        if job.cache_salt:
            engine_input["cache_salt"] = job.cache_salt
        return Prepared(engine_input, time.monotonic() - begin)

    def close(self) -> None:
        """Starts no further prompt."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class PlacingProcessor:
    """vLLM's processor of a model's images, with a placing of its own."""

    def __init__(self, model_config: Any, tokenizer: Any, placeholder_ids: Sequence[int] = ()):
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self.placeholder_ids = list(placeholder_ids)
        self._processor: Any = MULTIMODAL_REGISTRY.create_processor(
            model_config, tokenizer=copy.deepcopy(tokenizer)
        )
        for name in ("_apply_prompt_updates", "_find_mm_placeholders", "_apply_token_matches"):
            if not hasattr(self._processor, name):
                raise RuntimeError(
                    f"this vLLM's multi-modal processor has no {name}, which images are placed "
                    "with; use vLLM 0.25.1 to 0.32"
                )
        self._processor._apply_prompt_updates = self._place
        # Of the last prompt.
        self._updates: Updates = {}

    def learn(self) -> ImageFacts:
        """Tries an image, to see which ids stand for it."""
        info = self._processor.info
        max_images = info.allowed_mm_limits.get("image", 0)
        if max_images == 0:
            return ImageFacts(0, [], has_placeholders=False)
        text = self._processor.dummy_inputs.get_dummy_text({"image": 1})
        token_ids = self._encode(text) or [0]
        try:
            self.apply(token_ids, [PIL.Image.new("RGB", TRIAL_SIZE)], ["trial"], {})
        except ImageMismatch:
            # The text is not what the model's chat template writes; what was sought is known.
            pass
        alternatives = [one for item in self._updates.get("image", ()) for one in item]
        found = {token_id for one in alternatives for token_id in self._ids_in(one)}
        self.placeholder_ids = sorted(found)
        targets = [self._target_of(one) for one in alternatives]
        return ImageFacts(
            max_images,
            self.placeholder_ids,
            has_placeholders=bool(targets) and all(len(target) == 1 for target in targets),
        )

    def apply(
        self,
        token_ids: TokenIds,
        images: Sequence[PIL.Image.Image],
        names: Sequence[str],
        mm_processor_kwargs: Mapping[str, Any],
    ) -> Any:
        """vLLM's MultiModalInput; `names` tell the images apart in its caches."""
        from vllm.multimodal.parse import parse_mm_uuids
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        inputs = ProcessorInputs(
            token_ids,
            self._processor.info.parse_mm_data({"image": list(images)}),
            parse_mm_uuids({"image": list(names)}),
            hf_processor_mm_kwargs=dict(mm_processor_kwargs),
        )
        try:
            return self._processor.apply(inputs, TimingContext(enabled=False))
        except (ImageMismatch, MemoryError):
            raise
        except Exception as error:
            # Whatever a model's processor stumbles over; vLLM's own text shows all tensors.
            cause = error.__cause__ or error
            logger.info("the model's processor refused images", exc_info=error)
            raise InvalidImage(
                f"images: the model's processor refused them: {type(cause).__name__}: {cause}"[:500]
            ) from error

    # ---- placing ---------------------------------------------------------------------

    def _place(self, token_ids: TokenIds, updates: Updates) -> tuple[TokenIds, Found]:
        """Takes the place of vLLM's `_apply_prompt_updates`.

        In turn: all images are expanded already; none is; some are.
        """
        self._updates = updates
        found = self._processor._find_mm_placeholders(token_ids, updates)
        if _is_complete(found, updates) and not self._num_left_over(token_ids, found):
            return list(token_ids), found
        for expand in (self._expand_all, self._expand_some):
            expanded = expand(token_ids, updates)
            if expanded is None:
                continue
            found = self._processor._find_mm_placeholders(expanded, updates)
            if _is_complete(found, updates) and not self._num_left_over(expanded, found):
                return expanded, found
        raise self._mismatch(token_ids, updates)

    def _expand_all(self, token_ids: TokenIds, updates: Updates) -> TokenIds | None:
        expanded, chosen = self._processor._apply_token_matches(token_ids, updates)
        is_done = all(one is not None for items in chosen.values() for one in items)
        return list(expanded) if is_done else None

    def _expand_some(self, token_ids: TokenIds, updates: Updates) -> TokenIds | None:
        """Each image in turn where its placeholders begin, expanded unless they are already."""
        out: TokenIds = []
        position = 0
        for alternatives in updates.get("image", ()):
            target, full = self._target_of(alternatives[0]), self._full_of(alternatives[0])
            single = _index_of(target, token_ids, position)
            if not target or single is None:
                return None
            whole = _index_of(full, token_ids, position)
            # It may begin before the id that stands for it: a line feed, a marker.
            is_expanded = whole is not None and whole <= single
            begin, end = (whole, whole + len(full)) if is_expanded and whole is not None else (single, single + len(target))  # fmt: skip
            out += token_ids[position:begin] + full
            position = end
        return out + token_ids[position:]

    def _num_left_over(self, token_ids: TokenIds, found: Found) -> int:
        """Placeholders that belong to no image: vLLM would take them for text."""
        left = np.isin(token_ids, self.placeholder_ids)
        for item in found.get("image", ()):
            left[item.start_idx : item.start_idx + item.length] = False
        return int(left.sum())

    def _mismatch(self, token_ids: TokenIds, updates: Updates) -> ImageMismatch:
        needed = [
            int(np.isin(self._full_of(alternatives[0]), self.placeholder_ids).sum())
            for alternatives in updates.get("image", ())
        ]
        is_placeholder = np.isin(token_ids, self.placeholder_ids)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], is_placeholder, [0]))))
        runs = (edges[1::2] - edges[::2]).tolist()
        return ImageMismatch(
            f"expected a placeholder (token ids {self.placeholder_ids}) for each of {len(needed)} "
            f"images, or {sum(needed)} as their sizes need ({_shown(needed)}), got {sum(runs)} in "
            f"runs of {_shown(runs) or 'none'}",
            param="images",
        )

    def _ids_in(self, update: Any) -> list[int]:
        """The ids of an update that stand for an image."""
        full, mask = self._full_of(update), update.content.is_embed
        if mask is not None:
            selected = self._call_with_tokenizer(mask, update.content.full)
            full = np.array(full)[np.array(selected)].tolist()
        target = self._target_of(update)
        return full + (target if len(target) == 1 else [])

    def _target_of(self, update: Any) -> TokenIds:
        """What an image is put in place of; empty where it is put at a place, not for an id."""
        return self._encode(update.target) if isinstance(update.target, str | list) else []

    def _full_of(self, update: Any) -> TokenIds:
        return self._encode(update.content.full)

    def _call_with_tokenizer(self, mask: Any, full: Any) -> Any:
        # vLLM 0.25 hands on its tokenizer, 0.32 does not.
        try:
            return mask(full)
        except TypeError:
            return mask(self._processor.info.get_tokenizer(), full)

    def _encode(self, text: str | TokenIds) -> TokenIds:
        # vLLM 0.25 has text in some places.
        if not isinstance(text, str):
            return list(text)
        ids: TokenIds = self._processor.info.get_tokenizer().encode(text, add_special_tokens=False)
        return ids


def _decode(data: bytes, number: int) -> PIL.Image.Image:
    """As transformers reads an image: turned as its EXIF says, first frame, in RGB."""
    from transformers.image_utils import load_image

    try:
        image: PIL.Image.Image = load_image(PIL.Image.open(BytesIO(data)))
    except Exception as error:
        # Pillow raises whatever its readers stumble over.
        raise InvalidImage(
            f"images[{number}]: expected a whole image file, got one that cannot be decoded: "
            f"{type(error).__name__}: {error}"[:500]
        ) from error
    return image


def _is_complete(found: Found, updates: Updates) -> bool:
    return all(len(found.get(modality, ())) == len(items) for modality, items in updates.items())


def _index_of(wanted: TokenIds, token_ids: TokenIds, start: int) -> int | None:
    """Where `wanted` begins first, at `start` or behind."""
    position = start
    while wanted:
        try:
            position = token_ids.index(wanted[0], position)
        except ValueError:
            return None
        if token_ids[position : position + len(wanted)] == wanted:
            return position
        position += 1
    return None


def _shown(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:MAX_SHOWN]))
    return text + ", …" * (len(numbers) > MAX_SHOWN)
