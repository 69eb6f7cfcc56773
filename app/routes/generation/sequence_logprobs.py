"""`POST /get_sequence_logprobs/`: what a teacher thinks of sequences that exist already.

Follows `trl.generation.vllm_client.VLLMClient.get_sequence_logprobs` (trl 1.9 and 1.10).
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

import gevent
import numpy as np
import orjson
from flask import Blueprint, Response
from flask import request as http_request

from app.generation import Prompt, check_batch, generate
from app.http.responses import respond
from app.inputs.token_ids import check_length, checked_ids
from app.outputs.token_arrays import JSON, prompt_rows
from app.schemas.generation import SEQUENCES_BODY, SequencesBody, decode_body
from app.service import Admitted, current_service
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions, check_sampling
from titopool.wire.messages import Completed

blueprint = Blueprint("sequence_logprobs", __name__)


class Scored(NamedTuple):
    """Log-probabilities of one sequence after its prompt.

    A sequence without a prompt has NaN at its first token, which nothing stands before.
    """

    # float32 and int32 [tokens, k], best first.
    best: np.ndarray
    best_ids: np.ndarray
    # [tokens]: the sequence's own.
    own: np.ndarray
    own_ids: np.ndarray


@blueprint.post("/get_sequence_logprobs/")
def get_sequence_logprobs() -> Response:
    """Scores all sequences; nothing is generated."""
    with current_service().admit() as admission:
        body = decode_body(http_request.get_data(cache=False), SEQUENCES_BODY)
        prompts = _checked(admission, body)
        # vLLM makes one token at least.
        options = SamplingOptions(max_tokens=1, prompt_logprobs=body.top_logprobs)
        results = generate(admission, prompts, options)
        scored = [
            scores(result, prompt, length, body.top_logprobs)
            for result, prompt, length in zip(results, prompts, body.prompt_lengths, strict=True)
        ]
        reply = binary_reply if body.response_format == "binary" else json_reply
        return respond(orjson.dumps(reply(scored), option=orjson.OPT_SERIALIZE_NUMPY), JSON)


def _checked(admission: Admitted, body: SequencesBody) -> list[Prompt]:
    service, facts = admission.service, admission.facts
    num_sequences = len(body.sequences)
    if not num_sequences or num_sequences != len(body.prompt_lengths):
        raise InvalidRequest(
            "prompt_lengths: expected one for each of the sequences, and at least one, got "
            f"{len(body.prompt_lengths)} for {num_sequences}",
            param="prompt_lengths",
        )
    check_batch(num_sequences, 1, service.config.max_completions_per_request, "sequences")
    try:
        check_sampling(SamplingOptions(logprobs=body.top_logprobs), facts)
    except InvalidRequest as error:
        raise InvalidRequest(f"top_{error.message}", param="top_logprobs") from None
    prompts = []
    for index, (ids, length) in enumerate(zip(body.sequences, body.prompt_lengths, strict=True)):
        location = f"sequences[{index}]"
        array = checked_ids(ids, location, facts.vocab_size)
        check_length(len(array), location, facts.max_model_len)
        if not 0 <= length <= len(array):
            raise InvalidRequest(
                f"prompt_lengths[{index}]: expected a length from 0 to {len(array)}, that of the "
                f"sequence, got {length}",
                param="prompt_lengths",
            )
        prompts.append(Prompt(array, location))
    return prompts


def scores(result: Completed, sequence: Prompt, prompt_length: int, k: int) -> Scored:
    """The part of the engine's answer that is behind the prompt."""
    token_ids = sequence.token_ids
    values, ids, _ = prompt_rows(result, sequence.location, num_tokens=len(token_ids), k=k)
    # The first token's row is not there.
    first = np.full((1, k + 1), np.nan, dtype=np.float32)
    values = np.concatenate([first, values])[prompt_length:]
    ids = np.concatenate([np.zeros((1, k + 1), dtype=np.int32), ids])[prompt_length:]
    return Scored(values[:, 1:], ids[:, 1:], values[:, 0], token_ids[prompt_length:])


def json_reply(scored: Sequence[Scored]) -> dict[str, Any]:
    """[sequences][tokens][k, or k + 1 where the sequence's own token is not among the best]."""
    logprobs, token_ids = [], []
    for one in scored:
        values, ids = list(one.best), list(one.best_ids)
        is_among_best = (one.best_ids == one.own_ids[:, None]).any(axis=1)
        for position in np.flatnonzero(~is_among_best | np.isnan(one.own)):
            if np.isnan(one.own[position]):
                # As for a position that vLLM has nothing for.
                values[position], ids[position] = values[position][:0], ids[position][:0]
            else:
                values[position] = np.append(values[position], one.own[position])
                ids[position] = np.append(ids[position], one.own_ids[position])
        # Others take their turn between long sequences.
        gevent.sleep(0)
        logprobs.append(values)
        token_ids.append(ids)
    return {"logprobs": logprobs, "logprob_token_ids": token_ids}


def binary_reply(scored: Sequence[Scored]) -> dict[str, Any]:
    """Arrays in base64, padded with -inf and 0 to the longest sequence."""
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
