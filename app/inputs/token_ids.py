"""From the prompts of a body to checked token ids."""

from collections.abc import Sequence

import numpy as np

from app.inputs.admission import Admission
from app.inputs.tokenizer import encode_all
from app.schemas.generation import GenerateBody, SamplingBody, TokensPrompt
from titopool.errors import InvalidRequest, PromptTooLong
from titopool.wire.messages import WorkerFacts

# What is read as one kind; the text is for messages.
KINDS = {str: "text", list: "token ids", TokensPrompt: "TokensPrompt objects"}


def prompt_ids_of(body: GenerateBody, admission: Admission) -> list[np.ndarray]:
    """The ids of each prompt, int32, as the engine will get them.

    Raises:
        InvalidRequest: prompts of several kinds, an empty one, an id outside the vocabulary.
        PromptTooLong: a prompt leaves no room for a token.
    """
    _check_kinds(body.prompts)
    token_ids, facts = _token_ids(body.prompts, admission), admission.facts
    keep = tokens_to_keep(body, facts)
    checked = []
    for index, ids in enumerate(token_ids):
        array = checked_ids(ids, f"prompts[{index}]", facts.vocab_size)
        array = array if keep is None else array[-keep:]
        check_length(len(array), f"prompts[{index}]", facts.max_model_len)
        checked.append(array)
    return checked


def was_sent_as_ids(token_ids: np.ndarray, sent: str | list[int] | TokensPrompt) -> bool:
    """Whether the client sent just these ids: no text, nothing cut off."""
    given = _ids_in(sent)
    return given is not None and len(given) == len(token_ids)


def _check_kinds(prompts: Sequence[object]) -> None:
    if not prompts:
        raise InvalidRequest(
            "prompts: expected at least one prompt, got an empty list", param="prompts"
        )
    first = type(prompts[0])
    for index, prompt in enumerate(prompts):
        if type(prompt) is not first:
            raise InvalidRequest(
                f"prompts[{index}]: expected {KINDS[first]} like prompts[0], got "
                f"{KINDS[type(prompt)]}; send each kind in a request of its own",
                param="prompts",
            )


def _token_ids(
    prompts: Sequence[str | list[int] | TokensPrompt], admission: Admission
) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return admission.use_tokenizer(encode_all, texts)
    return [ids for ids in map(_ids_in, prompts) if ids is not None]


def _ids_in(prompt: str | list[int] | TokensPrompt) -> list[int] | None:
    if isinstance(prompt, TokensPrompt):
        return prompt.prompt_token_ids
    return prompt if isinstance(prompt, list) else None


def tokens_to_keep(body: SamplingBody, facts: WorkerFacts) -> int | None:
    """How many ids of each prompt `truncate_prompt_tokens` leaves; None: all."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return None
    if limit == -1:
        # One place is left for the first generated token.
        return facts.max_model_len - 1
    if limit < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens: expected -1 or at least 1, got {limit}",
            param="truncate_prompt_tokens",
        )
    return limit


def checked_ids(ids: list[int], place: str, vocab_size: int) -> np.ndarray:
    """Token ids as int32.

    Raises:
        InvalidRequest: there are none, or one is outside the vocabulary.
    """
    field = place.partition("[")[0]
    if not ids:
        raise InvalidRequest(
            f"{place}: expected at least one token, got an empty prompt", param=field
        )
    # Python's own integers first: they may be too large for any array.
    if min(ids) < 0 or max(ids) >= vocab_size:
        position = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{place}[{position}]: expected a token id in [0, {vocab_size}), got {ids[position]}",
            param=field,
        )
    return np.array(ids, dtype=np.int32)


def check_length(num_tokens: int, place: str, max_model_len: int) -> None:
    """Refuses a prompt that leaves no room for a token."""
    if num_tokens >= max_model_len:
        # "exceeds the model's context length": verifiers looks for these words to end a rollout
        # as too long, not as failed.
        raise PromptTooLong(
            f"{place}: expected at most {max_model_len - 1} tokens, one less than the "
            f"model's {max_model_len} (max_model_len), got {num_tokens}, which exceeds the model's "
            "context length; shorten the prompt or, on a route that takes it, set "
            "truncate_prompt_tokens",
            param=place.partition("[")[0],
        )
