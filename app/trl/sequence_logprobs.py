"""`POST /get_sequence_logprobs/`: a teacher's log-probabilities of given sequences.

Follows `trl.generation.vllm_client.VLLMClient.get_sequence_logprobs` (trl 1.9 and 1.10).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from flask import Blueprint, Response

from app.call.call import Call, admitted
from app.call.jobs import Prompt, check_prompt
from app.http.responses import respond_in_parts
from app.outputs.json_parts import Base64, Rows, json_parts
from app.outputs.token_arrays import JSON, PromptRows, prompt_rows
from app.route.operation import GENERATION_ERRORS, Example, Operation
from app.route.parameters import SESSION_ID
from app.time_slices import sharing_time
from app.trl.bodies import SEQUENCES_BODY, SequencesBody
from titopool.answers.generation import BinarySequencesAnswer, SequencesAnswer
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions, check_sampling
from titopool.wire.messages import Completed

blueprint = Blueprint("sequence_logprobs", __name__)


# Rows of an array that are encoded without a pause.
ROWS_AT_ONCE = 1024


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


# Makes the scores of all sequences, one by one: an answer has each several times.
AllScored = Callable[[], Iterator[Scored]]


@blueprint.post("/get_sequence_logprobs/")
@Operation(
    summary="Score sequences: nothing is generated.",
    body=SEQUENCES_BODY,
    answer=(SequencesAnswer, BinarySequencesAnswer),
    errors=GENERATION_ERRORS,
    headers=(SESSION_ID,),
    examples={
        "json": Example(
            "Two sequences",
            {
                "sequences": [[42, 1393, 14, 9], [5, 6, 7]],
                "prompt_lengths": [2, 0],
                "top_logprobs": 2,
            },
        ),
        "binary": Example(
            "The same as arrays",
            {
                "sequences": [[42, 1393, 14, 9]],
                "prompt_lengths": [2],
                "top_logprobs": 2,
                "response_format": "binary",
            },
        ),
    },
)
def get_sequence_logprobs() -> Response:
    """Scores all sequences and returns no generated tokens."""
    with admitted(SEQUENCES_BODY) as (call, body):
        prompts = _check_sequences(call, body)
        # A list of ids takes ten times the memory of the prompt.
        body.sequences = []
        # vLLM generates at least one token.
        options = SamplingOptions(max_tokens=1, prompt_logprobs=body.top_logprobs)
        request = call.make_request(prompts, options, min_weight_version=body.min_weight_version)
        results = call.run(request)
        for result, prompt in sharing_time(zip(results, prompts, strict=True)):
            # Before the head is sent: afterwards, an error would cut the answer.
            _rows(result, prompt, body.top_logprobs)
        sent = list(zip(results, prompts, body.prompt_lengths, strict=True))

        def scored() -> Iterator[Scored]:
            return (_score(*one, body.top_logprobs) for one in sent)

        reply = _binary_reply if body.response_format == "binary" else _json_reply
        return respond_in_parts(json_parts(reply(scored)), JSON)


def _check_sequences(call: Call, body: SequencesBody) -> list[Prompt]:
    num_sequences = len(body.sequences)
    if not num_sequences or num_sequences != len(body.prompt_lengths):
        raise InvalidRequest(
            "prompt_lengths: expected one length for each sequence, and at least one sequence, got "
            f"{len(body.prompt_lengths)} lengths for {num_sequences} sequences",
            param="prompt_lengths",
        )
    call.check_num_completions(num_sequences, 1, "sequences")
    try:
        check_sampling(SamplingOptions(logprobs=body.top_logprobs), call.facts)
    except InvalidRequest as error:
        raise InvalidRequest(f"top_{error.message}", param="top_logprobs") from None
    prompts = []
    pairs = zip(body.sequences, body.prompt_lengths, strict=True)
    for index, (ids, length) in enumerate(sharing_time(pairs)):
        prompts.append(check_prompt(ids, f"sequences[{index}]", call.facts))
        if not 0 <= length <= len(ids):
            raise InvalidRequest(
                f"prompt_lengths[{index}]: expected 0 to {len(ids)}, the sequence's length, got "
                f"{length}",
                param="prompt_lengths",
            )
    return prompts


def _rows(result: Completed, sequence: Prompt, k: int) -> PromptRows:
    """As `prompt_rows`."""
    return prompt_rows(result, sequence.location, num_tokens=len(sequence.token_ids), k=k)


def _score(result: Completed, sequence: Prompt, prompt_length: int, k: int) -> Scored:
    token_ids = sequence.token_ids
    values, ids, _ = _rows(result, sequence, k)
    if prompt_length:
        # The engine's rows begin at the second token.
        values, ids = values[prompt_length - 1 :], ids[prompt_length - 1 :]
    else:
        first = np.full((1, k + 1), np.nan, dtype=np.float32)
        values = np.concatenate([first, values])
        ids = np.concatenate([np.zeros((1, k + 1), dtype=np.int32), ids])
    return Scored(values[:, 1:], ids[:, 1:], values[:, 0], token_ids[prompt_length:])


def _json_reply(scored: AllScored) -> dict[str, Any]:
    """TRL's JSON format: nested lists in the shape [sequences][tokens][entries].

    A token has k entries, best first, and one more if the sequence's own token is not among
    them. A token without a log-probability has none.
    """
    return {
        "logprobs": (Rows(_entries(one.best, one.own, one)) for one in scored()),
        "logprob_token_ids": (Rows(_entries(one.best_ids, one.own_ids, one)) for one in scored()),
    }


def _entries(best: np.ndarray, own: np.ndarray, one: Scored) -> Iterator[np.ndarray]:
    """The entries of `best` at each token, and of `own` where the token is not among the best."""
    for begin in range(0, len(best), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        is_among_best = (one.best_ids[part] == one.own_ids[part, None]).any(axis=1)
        is_nan = np.isnan(one.own[part])
        rows = zip(best[part], own[part], is_among_best.tolist(), is_nan.tolist(), strict=True)
        for row, itself, has_own, has_none in rows:
            yield row[:0] if has_none else row if has_own else np.append(row, itself)


def _binary_reply(scored: AllScored) -> dict[str, Any]:
    """TRL's binary format: little-endian arrays in base64.

    Shape [sequences, tokens, k], and [sequences, tokens, 1] for the sequences' own tokens;
    shorter sequences are padded with -inf and 0.
    """
    shapes = [one.best.shape for one in scored()]
    lengths = [length for length, _ in shapes]
    longest = max(lengths)
    return {
        "logprobs_b64": _padded((one.best for one in scored()), longest, -np.inf),
        "token_ids_b64": _padded((one.best_ids for one in scored()), longest, 0),
        "actual_logprobs_b64": _padded((one.own[:, None] for one in scored()), longest, -np.inf),
        "actual_token_ids_b64": _padded((one.own_ids[:, None] for one in scored()), longest, 0),
        "shape": [len(shapes), longest, shapes[0][1]],
        "completion_lengths": lengths,
    }


def _padded(arrays: Iterable[np.ndarray], longest: int, padding: float) -> Base64:
    """Arrays in base64, one after the other, each padded to `longest` rows."""

    def parts() -> Iterator[bytes]:
        for array in arrays:
            for begin in range(0, max(1, longest), ROWS_AT_ONCE):
                rows = min(ROWS_AT_ONCE, longest - begin)
                padded = np.full((rows, array.shape[1]), padding, dtype=array.dtype)
                part = array[begin : begin + rows]
                padded[: len(part)] = part
                if padded.dtype == np.float32:
                    padded[np.isnan(padded)] = padding
                yield padded.tobytes()

    return Base64(parts())
