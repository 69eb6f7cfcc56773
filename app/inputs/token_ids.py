"""Turns the prompts of `POST /generate/` into checked token ids, and checks ids of all routes."""

from collections.abc import Sequence

import numpy as np

from app.inputs.admission import Admission
from app.schemas.generation import GenerateBody, SamplingBody, TokensPrompt
from app.time_slices import sharing_time
from titopool.errors import InvalidRequest, PromptTooLong
from titopool.settings.sampling import check_token_ids
from titopool.wire.messages import WorkerFacts

# Kinds of prompts, as error messages name them.
KINDS: dict[type, str] = {
    str: "text", list: "token ids", np.ndarray: "token ids", TokensPrompt: "TokensPrompt objects",
}  # fmt: skip
# As a client sends them, and as long lists are decoded (`app/schemas/long_lists.py`).
TokenIds = list[int] | np.ndarray


def prompt_ids_of(body: GenerateBody, admission: Admission) -> list[np.ndarray]:
    """The ids of each prompt as the engine gets them, int32 [tokens].

    Raises:
        InvalidRequest: the prompts are of several kinds, a prompt is empty, or an id is outside
            the vocabulary.
        PromptTooLong: a prompt leaves no room for a generated token.
    """
    _check_kinds(body.prompts)
    facts = admission.facts
    keep = tokens_to_keep(body, facts)
    token_ids = _token_ids(body.prompts, admission, is_truncated=keep is not None)
    checked = []
    for index, ids in enumerate(sharing_time(token_ids)):
        location = f"prompts[{index}]"
        # Before the ids are visited: there may be millions.
        check_length(min(len(ids), keep or len(ids)), location, facts.max_model_len)
        array = checked_ids(ids, location, facts.vocab_size)
        checked.append(array if keep is None else array[-keep:])
    return checked


def was_sent_as_ids(token_ids: np.ndarray, sent: str | list[int] | TokensPrompt) -> bool:
    """Whether the client sent these ids itself: no text, and no truncation."""
    sent_ids = _ids_in(sent)
    return sent_ids is not None and len(sent_ids) == len(token_ids)


def _check_kinds(prompts: Sequence[object]) -> None:
    if not prompts:
        raise InvalidRequest(
            "prompts: expected at least one prompt, got an empty list", param="prompts"
        )
    first = KINDS[type(prompts[0])]
    for index, prompt in enumerate(prompts):
        if (kind := KINDS[type(prompt)]) != first:
            raise InvalidRequest(
                f"prompts[{index}]: expected {first} like prompts[0], got "
                f"{kind}; send each kind in a separate request",
                param="prompts",
            )


def _token_ids(
    prompts: Sequence[str | list[int] | TokensPrompt], admission: Admission, *, is_truncated: bool
) -> Sequence[TokenIds]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        locations = [f"prompts[{index}]" for index in range(len(texts))]
        return admission.encode(texts, locations, is_truncated=is_truncated)
    return [ids for ids in map(_ids_in, prompts) if ids is not None]


def _ids_in(prompt: str | TokenIds | TokensPrompt) -> TokenIds | None:
    if isinstance(prompt, TokensPrompt):
        return prompt.prompt_token_ids
    return None if isinstance(prompt, str) else prompt


def tokens_to_keep(body: SamplingBody, facts: WorkerFacts) -> int | None:
    """How many ids of each prompt `truncate_prompt_tokens` keeps, from the end; None: all."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return None
    if limit == -1:
        # Leaves room for one generated token.
        return facts.max_model_len - 1
    if limit < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens: expected -1 or at least 1, got {limit}",
            param="truncate_prompt_tokens",
        )
    return limit


def checked_ids(ids: TokenIds, location: str, vocab_size: int) -> np.ndarray:
    """Token ids as int32 [tokens]; `location` is their location in the client's body.

    Raises:
        InvalidRequest: there are no ids, or an id is outside the vocabulary.
    """
    if not len(ids):
        raise InvalidRequest(
            f"{location}: expected at least one token, got an empty prompt",
            param=location.partition("[")[0],
        )
    # Before the conversion, because an integer may be too large for int32.
    check_token_ids(location, ids, vocab_size)
    return np.asarray(ids, dtype=np.int32)


def check_length(num_tokens: int, location: str, max_model_len: int) -> None:
    """Raises PromptTooLong for a prompt that leaves no room for a generated token."""
    if num_tokens >= max_model_len:
        # verifiers searches for "exceeds the model's context length" and then ends the rollout as
        # too long instead of failed.
        raise PromptTooLong(
            f"{location}: expected at most {max_model_len - 1} tokens, one less than the "
            f"model's {max_model_len} (max_model_len), got {num_tokens}, which exceeds the model's "
            "context length; shorten the prompt or, on a route that takes it, set "
            "truncate_prompt_tokens",
            param=location.partition("[")[0],
        )
