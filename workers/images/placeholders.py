"""Places images in prompts: vLLM's processor of a model, with two methods replaced.

vLLM replaces the first placeholder of each image by the image's expansion, also if the client has
expanded the placeholders already, and searches decoded text for placeholders that it does not find.
The replacement keeps expanded placeholders, expands single ones, refuses everything else, and never
decodes token ids.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from titopool.errors import ImageMismatch, InvalidImage, TitopoolError
from titopool.wire.messages import ImageFacts
from workers.vllm_internals import installed_version, missing_for_images

logger = logging.getLogger(__name__)

# Pixels of the image that each processor is tried with at start.
TRIAL_SIZE = (64, 64)
# Numbers that an error message shows.
MAX_SHOWN = 8
# Methods with which some processors change token ids before placing; 0.25's name and 0.32's.
BEFORE_PLACING = ("_apply_hf_processor_tokens_only", "_postprocess_prompt")

TokenIds = list[int]
# vLLM's prompt updates: for each modality and item, the alternative replacements.
Updates = Mapping[str, Sequence[Sequence[Any]]]
Found = Mapping[str, list[Any]]


class _Span(NamedTuple):
    """The position of one image in a prompt."""

    begin: int
    end: int
    is_expanded: bool


class _Placing:
    """The placing of one prompt's images."""

    def __init__(self, encoding: "_Encoding", processor: Any, placeholder_ids: list[int]):
        self._encoding = encoding
        self._processor = processor
        self._placeholder_ids = placeholder_ids
        # Set when vLLM has called: its updates, and the placed ids once they fit.
        self.updates: Updates = {}
        self.placed: TokenIds | None = None

    def place(self, token_ids: TokenIds, updates: Updates) -> tuple[TokenIds, Found]:
        """Replaces vLLM's `_apply_prompt_updates`.

        Tries in turn: all images are expanded already, none is, some are.
        """
        self.updates = updates
        for expand in (None, self._expand_all, self._expand_some):
            expanded = expand(token_ids, updates) if expand else list(token_ids)
            if expanded is None:
                continue
            found = self._processor._find_mm_placeholders(expanded, updates)
            if _is_complete(found, updates) and not self._num_left_over(expanded, found):
                self.placed = expanded
                return list(expanded), found
        raise self._mismatch(token_ids, updates)

    def _expand_all(self, token_ids: TokenIds, updates: Updates) -> TokenIds | None:
        expanded, chosen = self._processor._apply_token_matches(token_ids, updates)
        is_done = all(one is not None for items in chosen.values() for one in items)
        return list(expanded) if is_done else None

    def _expand_some(self, token_ids: TokenIds, updates: Updates) -> TokenIds | None:
        """Expands, from the left, each image whose placeholder is single."""
        wanted = [alternatives[0] for alternatives in updates.get("image", ())]
        spans: list[_Span] = []
        for update in wanted:
            span = self._span_of(update, token_ids, spans[-1].end if spans else 0)
            if span is None:
                return None
            spans.append(span)
        for before, after in pairwise(spans):
            # More likely a wrong number of placeholders than an expanded image next to a single one.
            if before.end == after.begin and before.is_expanded != after.is_expanded:
                return None
        expanded, position = [], 0
        for update, span in zip(wanted, spans, strict=True):
            expanded += token_ids[position : span.begin] + self._encoding.full_of(update)
            position = span.end
        return expanded + token_ids[position:]

    def _span_of(self, update: Any, token_ids: TokenIds, start: int) -> _Span | None:
        target, full = self._encoding.target_of(update), self._encoding.full_of(update)
        single = _index_of(target, token_ids, start)
        if single is None:
            return None
        whole = _index_of(full, token_ids, start)
        # An expansion may begin before its first placeholder: with a line feed or a marker.
        if whole is not None and whole <= single:
            return _Span(whole, whole + len(full), is_expanded=True)
        return _Span(single, single + len(target), is_expanded=False)

    def _num_left_over(self, token_ids: TokenIds, found: Found) -> int:
        """The number of placeholders without an image, which vLLM would process as text."""
        left = np.isin(token_ids, self._placeholder_ids)
        for item in found.get("image", ()):
            left[item.start_idx : item.start_idx + item.length] = False
        return int(left.sum())

    def _mismatch(self, token_ids: TokenIds, updates: Updates) -> ImageMismatch:
        ids = self._placeholder_ids
        needed = [
            int(np.isin(self._encoding.full_of(alternatives[0]), ids).sum())
            for alternatives in updates.get("image", ())
        ]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], np.isin(token_ids, ids), [0]))))
        runs = (edges[1::2] - edges[::2]).tolist()
        return ImageMismatch(
            f"expected a placeholder (token ids {ids}) for each of {len(needed)} images, or "
            f"{sum(needed)} as their sizes need ({_shown(needed)}), got {sum(runs)} in runs of "
            f"{_shown(runs) or 'none'}",
            param="images",
        )


class _Encoding:
    """The token ids of vLLM's prompt updates."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def image_ids(self, updates: Sequence[Any]) -> list[int]:
        """The ids that stand for images only."""
        found: set[int] = set()
        for update in updates:
            full, mask, target = (
                self.full_of(update),
                update.content.is_embed,
                self.target_of(update),
            )
            if mask is not None:
                selected = self._call_with_tokenizer(mask, update.content.full)
                full = np.array(full)[np.array(selected)].tolist()
            found |= {*full, *(target if len(target) == 1 else [])}
        ordinary = ("eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id")
        return sorted(found - {getattr(self._tokenizer, name, None) for name in ordinary})

    def target_of(self, update: Any) -> TokenIds:
        """The ids that an image replaces; empty if vLLM inserts it at a position instead."""
        return self.encode(update.target) if isinstance(update.target, str | list) else []

    def full_of(self, update: Any) -> TokenIds:
        """The image's expansion."""
        return self.encode(update.content.full)

    def _call_with_tokenizer(self, mask: Any, full: Any) -> Any:
        # vLLM 0.25 passes its tokenizer, 0.32 does not.
        try:
            return mask(full)
        except TypeError:
            return mask(self._tokenizer, full)

    def encode(self, text: str | TokenIds) -> TokenIds:
        """`text` as token ids; vLLM 0.25 has text in some updates, otherwise there are ids."""
        if not isinstance(text, str):
            return list(text)
        ids: TokenIds = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class PlacingProcessor:
    """Makes vLLM's input from token ids and images; one thread at a time may use it."""

    def __init__(self, model_config: Any, tokenizer: Any):
        from vllm.multimodal import MULTIMODAL_REGISTRY

        own_tokenizer = copy.deepcopy(tokenizer)
        self._encoding = _Encoding(own_tokenizer)
        self._processor: Any = MULTIMODAL_REGISTRY.create_processor(
            model_config, tokenizer=own_tokenizer
        )
        self._placeholder_ids: list[int] = []
        for name in BEFORE_PLACING:
            if hasattr(self._processor, name):
                setattr(self._processor, name, lambda token_ids: token_ids)

    def learn(self) -> ImageFacts | None:
        """Tries an image, to find the token ids that stand for one.

        Returns:
            None if images cannot be placed in this model's prompts as `_Placing` does: then the
            server takes none for this model.
        """
        max_images = self._processor.info.allowed_mm_limits.get("image", 0)
        if max_images == 0:
            return None
        placing = self._new_placing()
        try:
            if lacks := missing_for_images():
                raise RuntimeError(f"vLLM {installed_version()} has no {lacks[0]}")
            text = self._processor.dummy_inputs.get_dummy_text({"image": 1})
            trial = PIL.Image.new("RGB", TRIAL_SIZE)
            self._process(placing, self._encoding.encode(text) or [0], [trial], ["trial"], {})
        except ImageMismatch:
            # The dummy text may differ from the chat template's; the updates are known all the same.
            pass
        except Exception as error:
            cause = error.__cause__ or error
            logger.warning("image input disabled: %s: %s", type(cause).__name__, cause)
            return None
        alternatives = [one for item in placing.updates.get("image", ()) for one in item]
        if not alternatives:
            logger.warning(
                "image input disabled: this model's vLLM processor bypasses `_apply_prompt_updates`"
            )
            return None
        self._placeholder_ids = self._encoding.image_ids(alternatives)
        targets = [self._encoding.target_of(one) for one in alternatives]
        return ImageFacts(
            max_images,
            self._placeholder_ids,
            has_placeholders=all(
                len(target) == 1 and target[0] in self._placeholder_ids for target in targets
            ),
        )

    def apply(
        self,
        token_ids: TokenIds,
        images: Sequence[PIL.Image.Image],
        names: Sequence[str],
        mm_processor_kwargs: Mapping[str, Any],
    ) -> Any:
        """vLLM's MultiModalInput.

        Args:
            names: identify the images in vLLM's caches.

        Raises:
            ImageMismatch: the images do not fit the placeholders.
            InvalidImage: the model's processor refuses them.
        """
        try:
            return self._process(self._new_placing(), token_ids, images, names, mm_processor_kwargs)
        except (TitopoolError, MemoryError):
            raise
        except Exception as error:
            # A model's processor may raise anything; vLLM's message would show all tensors.
            cause = error.__cause__ or error
            logger.info("the model's processor refused images", exc_info=error)
            raise InvalidImage(
                f"the model's processor refused the images: {type(cause).__name__}: {cause}"[:500],
                param="images",
            ) from error

    def _new_placing(self) -> _Placing:
        return _Placing(self._encoding, self._processor, self._placeholder_ids)

    def _process(
        self,
        placing: _Placing,
        token_ids: TokenIds,
        images: Sequence[PIL.Image.Image],
        names: Sequence[str],
        mm_processor_kwargs: Mapping[str, Any],
    ) -> Any:
        from vllm.multimodal.parse import parse_mm_uuids
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        self._processor._apply_prompt_updates = placing.place
        inputs = ProcessorInputs(
            token_ids,
            self._processor.info.parse_mm_data({"image": list(images)}),
            parse_mm_uuids({"image": list(names)}),
            hf_processor_mm_kwargs=dict(mm_processor_kwargs),
        )
        engine_input = self._processor.apply(inputs, TimingContext(enabled=False))
        if placing.placed is not None and engine_input["prompt_token_ids"] != placing.placed:
            raise RuntimeError("vLLM's processor for this model changes token ids")
        # Some models cut an image differently when it is not alone: such inputs get other names.
        lengths = [one.length for one in engine_input["mm_placeholders"].get("image", ())]
        hashes = engine_input["mm_hashes"]
        hashes["image"] = [
            f"{name}-{length}" for name, length in zip(hashes["image"], lengths, strict=True)
        ]
        return engine_input


def _is_complete(found: Found, updates: Updates) -> bool:
    return all(len(found.get(modality, ())) == len(items) for modality, items in updates.items())


def _index_of(wanted: TokenIds, token_ids: TokenIds, start: int) -> int | None:
    """The first index from `start` on at which `wanted` begins; None: not found, or `wanted` is empty."""
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
