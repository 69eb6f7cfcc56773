"""`POST /get_sequence_logprobs/`: a teacher's log-probabilities of given sequences.

Follows `trl.generation.vllm_client.VLLMClient.get_sequence_logprobs` (trl 1.9 and 1.10).
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from flask import Blueprint, Response

from app.generation import Prompt, check_prompt, run_prompts
from app.http.responses import json_line, respond
from app.inputs.admission import Admission
from app.inputs.sampling import check_num_completions
from app.outputs.token_arrays import JSON, prompt_rows
from app.schemas.generation import SEQUENCES_BODY, SequencesBody
from app.service import current_service
from app.time_slices import sharing_time
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions, check_sampling
from titopool.wire.messages import Completed

blueprint = Blueprint("sequence_logprobs", __name__)


class Scored(NamedTuple):
    """The log-probabilities of one sequence's tokens after its prompt.

    Without a prompt, the first token has NaN: a model gives it no probability.
    """

    # float32 and int32, [tokens, k], best first.
    best: np.ndarray
    best_ids: np.ndarray
    # float32 and int32, [tokens]: the sequence's own tokens.
    own: np.ndarray
    own_ids: np.ndarray


@blueprint.post("/get_sequence_logprobs/")
def get_sequence_logprobs() -> Response:
    """Scores all sequences and returns no generated tokens."""
    with current_service().admit(SEQUENCES_BODY) as (admission, body):
        prompts = _check_sequences(admission, body)
        # A list of ids takes ten times the memory of the prompt.
        body.sequences = []
        # vLLM generates at least one token.
        options = SamplingOptions(max_tokens=1, prompt_logprobs=body.top_logprobs)
        results = run_prompts(
            admission, prompts, options, min_weight_version=body.min_weight_version
        )
        scored = [
            _score(result, prompt, length, body.top_logprobs)
            for result, prompt, length in zip(results, prompts, body.prompt_lengths, strict=True)
        ]
        reply = _binary_reply if body.response_format == "binary" else _json_reply
        return respond(json_line(reply(scored)), JSON)


def _check_sequences(admission: Admission, body: SequencesBody) -> list[Prompt]:
    num_sequences = len(body.sequences)
    if not num_sequences or num_sequences != len(body.prompt_lengths):
        raise InvalidRequest(
            "prompt_lengths: expected one length for each sequence, and at least one sequence, got "
            f"{len(body.prompt_lengths)} lengths for {num_sequences} sequences",
            param="prompt_lengths",
        )
    limit = admission.config.max_completions_per_request
    check_num_completions(num_sequences, 1, limit, "sequences")
    try:
        check_sampling(SamplingOptions(logprobs=body.top_logprobs), admission.facts)
    except InvalidRequest as error:
        raise InvalidRequest(f"top_{error.message}", param="top_logprobs") from None
    prompts = []
    pairs = zip(body.sequences, body.prompt_lengths, strict=True)
    for index, (ids, length) in enumerate(sharing_time(pairs)):
        prompts.append(check_prompt(ids, f"sequences[{index}]", admission.facts))
        if not 0 <= length <= len(ids):
            raise InvalidRequest(
                f"prompt_lengths[{index}]: expected 0 to {len(ids)}, the sequence's length, got "
                f"{length}",
                param="prompt_lengths",
            )
    return prompts


def _score(result: Completed, sequence: Prompt, prompt_length: int, k: int) -> Scored:
    token_ids = sequence.token_ids
    values, ids, _ = prompt_rows(result, sequence.location, num_tokens=len(token_ids), k=k)
    # The engine's rows begin at the second token.
    first = np.full((1, k + 1), np.nan, dtype=np.float32)
    values = np.concatenate([first, values])[prompt_length:]
    ids = np.concatenate([np.zeros((1, k + 1), dtype=np.int32), ids])[prompt_length:]
    return Scored(values[:, 1:], ids[:, 1:], values[:, 0], token_ids[prompt_length:])


def _json_reply(scored: Sequence[Scored]) -> dict[str, Any]:
    """TRL's JSON format: nested lists in the shape [sequences][tokens][entries].

    A token has k entries, best first, and one more if the sequence's own token is not among
    them. A token without a log-probability has none.
    """
    logprobs, token_ids = [], []
    for one in sharing_time(scored):
        values, ids = list(one.best), list(one.best_ids)
        is_among_best = (one.best_ids == one.own_ids[:, None]).any(axis=1)
        for position in np.flatnonzero(~is_among_best | np.isnan(one.own)):
            if np.isnan(one.own[position]):
                values[position], ids[position] = values[position][:0], ids[position][:0]
            else:
                values[position] = np.append(values[position], one.own[position])
                ids[position] = np.append(ids[position], one.own_ids[position])
        logprobs.append(values)
        token_ids.append(ids)
    return {"logprobs": logprobs, "logprob_token_ids": token_ids}


def _binary_reply(scored: Sequence[Scored]) -> dict[str, Any]:
    """TRL's binary format: little-endian arrays in base64.

    Shape [sequences, tokens, k], and [sequences, tokens, 1] for the sequences' own tokens;
    shorter sequences are padded with -inf and 0.
    """
    lengths = [len(one.own_ids) for one in scored]
    shape = [len(scored), max(lengths), scored[0].best.shape[1]]
    return {
        "logprobs_b64": _padded([one.best for one in scored], shape, -np.inf),
        "token_ids_b64": _padded([one.best_ids for one in scored], shape, 0),
        "actual_logprobs_b64": _padded([one.own[:, None] for one in scored], shape, -np.inf),
        "actual_token_ids_b64": _padded([one.own_ids[:, None] for one in scored], shape, 0),
        "shape": shape,
        "completion_lengths": lengths,
    }


def _padded(arrays: Sequence[np.ndarray], shape: Sequence[int], padding: float) -> str:
    width = arrays[0].shape[1]
    padded = np.full((shape[0], shape[1], width), padding, dtype=arrays[0].dtype)
    for index, array in enumerate(arrays):
        padded[index, : len(array)] = array
    if padded.dtype == np.float32:
        padded[np.isnan(padded)] = padding
    return b64encode(padded.tobytes()).decode()
