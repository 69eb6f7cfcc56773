"""Where the images of a prompt go: vLLM's processor of a model, with a placing of its own.

vLLM replaces the first placeholder of each image by as many as the image needs, also where
the client's processor had done so before, and looks for placeholders that it does not find in
decoded text. Here expanded placeholders stay as they are, single ones are expanded, what
fits neither is refused, and token ids are never decoded.
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

logger = logging.getLogger(__name__)

# Of the image that a processor is tried with at start.
TRIAL_SIZE = (64, 64)
# Numbers of a message.
MAX_SHOWN = 8
# What is replaced in vLLM's processor, and what is called of it.
NEEDED = ("_apply_prompt_updates", "_find_mm_placeholders", "_apply_token_matches")
# What some processors change ids with before they are placed; 0.25's name and 0.32's.
BEFORE_PLACING = ("_apply_hf_processor_tokens_only", "_postprocess_prompt")

TokenIds = list[int]
# vLLM's: for each modality, for each item, the alternatives of what to put where.
Updates = Mapping[str, Sequence[Sequence[Any]]]
Found = Mapping[str, list[Any]]


class _Place(NamedTuple):
    """Where one image stands in a prompt."""

    begin: int
    end: int
    is_expanded: bool


class PlacingProcessor:
    """Makes vLLM's input of token ids and images; used by one thread at a time."""

    def __init__(self, model_config: Any, tokenizer: Any):
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self._tokenizer = copy.deepcopy(tokenizer)
        self._processor: Any = MULTIMODAL_REGISTRY.create_processor(
            model_config, tokenizer=self._tokenizer
        )
        self._placeholder_ids: list[int] = []
        # Of the prompt under way: what is to be placed, and the ids once it is.
        self._updates: Updates | None = None
        self._placed: TokenIds | None = None
        for name in BEFORE_PLACING:
            if hasattr(self._processor, name):
                setattr(self._processor, name, lambda token_ids: token_ids)
        self._processor._apply_prompt_updates = self._place

    def learn(self) -> ImageFacts | None:
        """Tries an image, to see which ids stand for one.

        Returns:
            None when this model's images cannot be placed as is promised here: then it takes
            none, which is better than to train on what is not known.
        """
        max_images = self._processor.info.allowed_mm_limits.get("image", 0)
        if max_images == 0:
            return None
        try:
            if missing := [name for name in NEEDED if not hasattr(self._processor, name)]:
                raise RuntimeError(f"vLLM's processor has no {missing}")
            text = self._processor.dummy_inputs.get_dummy_text({"image": 1})
            trial = PIL.Image.new("RGB", TRIAL_SIZE)
            self._apply(self._encode(text) or [0], [trial], ["trial"], {})
        except ImageMismatch:
            # The text is not what the model's chat template writes; what was sought is known.
            pass
        except Exception as error:
            cause = error.__cause__ or error
            logger.warning("takes no images: %s: %s", type(cause).__name__, cause)
            return None
        alternatives = [one for item in (self._updates or {}).get("image", ()) for one in item]
        if not alternatives:
            logger.warning("takes no images: vLLM places those of this model by another way")
            return None
        self._placeholder_ids = self._ids_for_images(alternatives)
        targets = [self._target_of(one) for one in alternatives]
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
            names: tell the images apart in vLLM's caches.

        Raises:
            ImageMismatch: the images do not fit the placeholders.
            InvalidImage: the model's processor refuses them.
        """
        try:
            return self._apply(token_ids, images, names, mm_processor_kwargs)
        except (TitopoolError, MemoryError):
            raise
        except Exception as error:
            # Whatever a model's processor stumbles over; vLLM's own text shows all tensors.
            cause = error.__cause__ or error
            logger.info("the model's processor refused images", exc_info=error)
            raise InvalidImage(
                f"the model's processor refused the images: {type(cause).__name__}: {cause}"[:500],
                param="images",
            ) from error

    def _apply(
        self,
        token_ids: TokenIds,
        images: Sequence[PIL.Image.Image],
        names: Sequence[str],
        mm_processor_kwargs: Mapping[str, Any],
    ) -> Any:
        from vllm.multimodal.parse import parse_mm_uuids
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        self._updates = self._placed = None
        inputs = ProcessorInputs(
            token_ids,
            self._processor.info.parse_mm_data({"image": list(images)}),
            parse_mm_uuids({"image": list(names)}),
            hf_processor_mm_kwargs=dict(mm_processor_kwargs),
        )
        engine_input = self._processor.apply(inputs, TimingContext(enabled=False))
        if self._placed is not None and engine_input["prompt_token_ids"] != self._placed:
            raise RuntimeError("vLLM's processor for this model changes token ids")
        # Some models cut an image otherwise when it is not alone.
        lengths = [one.length for one in engine_input["mm_placeholders"].get("image", ())]
        hashes = engine_input["mm_hashes"]
        hashes["image"] = [
            f"{name}-{length}" for name, length in zip(hashes["image"], lengths, strict=True)
        ]
        return engine_input

    # ---- placing ---------------------------------------------------------------------

    def _place(self, token_ids: TokenIds, updates: Updates) -> tuple[TokenIds, Found]:
        """Takes the place of vLLM's `_apply_prompt_updates`.

        In turn: all images are expanded already; none is; some are.
        """
        self._updates = updates
        for expand in (self._expand_none, self._expand_all, self._expand_some):
            expanded = expand(token_ids, updates)
            if expanded is None:
                continue
            found = self._processor._find_mm_placeholders(expanded, updates)
            if _is_complete(found, updates) and not self._num_left_over(expanded, found):
                self._placed = expanded
                return list(expanded), found
        raise self._mismatch(token_ids, updates)

    def _expand_none(self, token_ids: TokenIds, updates: Updates) -> TokenIds:
        return list(token_ids)

    def _expand_all(self, token_ids: TokenIds, updates: Updates) -> TokenIds | None:
        expanded, chosen = self._processor._apply_token_matches(token_ids, updates)
        is_done = all(one is not None for items in chosen.values() for one in items)
        return list(expanded) if is_done else None

    def _expand_some(self, token_ids: TokenIds, updates: Updates) -> TokenIds | None:
        """Each image in turn where its placeholders begin, expanded unless they are already."""
        wanted = [alternatives[0] for alternatives in updates.get("image", ())]
        places: list[_Place] = []
        for update in wanted:
            place = self._place_of(update, token_ids, places[-1].end if places else 0)
            if place is None:
                return None
            places.append(place)
        for before, after in pairwise(places):
            # A wrong number of placeholders, more likely than one image of each kind.
            if before.end == after.begin and before.is_expanded != after.is_expanded:
                return None
        expanded, position = [], 0
        for update, place in zip(wanted, places, strict=True):
            expanded += token_ids[position : place.begin] + self._full_of(update)
            position = place.end
        return expanded + token_ids[position:]

    def _place_of(self, update: Any, token_ids: TokenIds, start: int) -> _Place | None:
        target, full = self._target_of(update), self._full_of(update)
        single = _index_of(target, token_ids, start)
        if single is None:
            return None
        whole = _index_of(full, token_ids, start)
        # It may begin before the id that stands for it: a line feed, a marker.
        if whole is not None and whole <= single:
            return _Place(whole, whole + len(full), is_expanded=True)
        return _Place(single, single + len(target), is_expanded=False)

    def _num_left_over(self, token_ids: TokenIds, found: Found) -> int:
        """Placeholders that belong to no image: vLLM would take them for text."""
        left = np.isin(token_ids, self._placeholder_ids)
        for item in found.get("image", ()):
            left[item.start_idx : item.start_idx + item.length] = False
        return int(left.sum())

    def _mismatch(self, token_ids: TokenIds, updates: Updates) -> ImageMismatch:
        ids = self._placeholder_ids
        needed = [
            int(np.isin(self._full_of(alternatives[0]), ids).sum())
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

    # ---- vLLM's updates --------------------------------------------------------------

    def _ids_for_images(self, updates: Sequence[Any]) -> list[int]:
        """The ids that stand for an image, and for nothing else."""
        found: set[int] = set()
        for update in updates:
            full, mask, target = self._full_of(update), update.content.is_embed, []
            if mask is not None:
                selected = self._call_with_tokenizer(mask, update.content.full)
                full = np.array(full)[np.array(selected)].tolist()
            target = self._target_of(update)
            found |= {*full, *(target if len(target) == 1 else [])}
        ordinary = ("eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id")
        return sorted(found - {getattr(self._tokenizer, name, None) for name in ordinary})

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
            return mask(self._tokenizer, full)

    def _encode(self, text: str | TokenIds) -> TokenIds:
        # vLLM 0.25 has text in some places.
        if not isinstance(text, str):
            return list(text)
        ids: TokenIds = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _is_complete(found: Found, updates: Updates) -> bool:
    return all(len(found.get(modality, ())) == len(items) for modality, items in updates.items())


def _index_of(wanted: TokenIds, token_ids: TokenIds, start: int) -> int | None:
    """Where `wanted` begins first, at `start` or behind; None if nowhere, or if it is empty."""
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
