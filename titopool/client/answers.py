"""Reads the server's answers: results, errors and its release. No IO."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from titopool.answers.generation import BinarySequencesAnswer
from titopool.answers.operators import Models, Ready, WeightInfo
from titopool.client.failures import IncompatibleServer, UnexpectedAnswer
from titopool.client.results import (
    Completion,
    PromptResult,
    Score,
    ServerInfo,
    SessionSample,
    WorkerStatus,
)
from titopool.errors import ERRORS_BY_CODE, InvalidRequest, TitopoolError
from titopool.release import RELEASE, VERSION_HEADER, are_compatible, series_of
from titopool.wire.logprob_entries import sampled_of

MAX_SHOWN_BYTES = 200
MSGPACK = "application/msgpack"
# The error of a status whose code this release does not know.
ERRORS_BY_STATUS = {error.status: error for error in reversed(ERRORS_BY_CODE.values())}

T = TypeVar("T")


class Answer(msgspec.Struct):
    """One HTTP answer, read to its end."""

    status: int
    # Names in lower case.
    headers: Mapping[str, str]
    content: bytes
    url: str

    def shown(self) -> str:
        """The beginning of the content, for an error's message."""
        text = repr(self.content[:MAX_SHOWN_BYTES].decode(errors="replace"))
        return text if len(self.content) <= MAX_SHOWN_BYTES else f"{text}…"


class TokensBody(msgspec.Struct):
    """docs/http.md, "The binary answer"."""

    prompt_ids: list[bytes | None]
    completion_ids: list[bytes]
    finish_reasons: list[str]
    weight_versions: list[list[tuple[int, int]]]
    num_cached_tokens: list[int]
    logprobs: list[bytes] | None = None
    logprob_token_ids: list[bytes | None] | None = None
    num_logprobs: list[bytes | None] | None = None
    raw_logprobs: list[bytes] | None = None
    lora_versions: list[int | None] | None = None
    image_ranges: list[list[tuple[int, int]]] | None = None
    kv_from: list[list[int]] | None = None


TOKENS_DECODER = msgspec.msgpack.Decoder(TokensBody)


def checked(answer: Answer, *, statuses: Sequence[int] = (200,)) -> Answer:
    """The answer, if it is the server's and has one of `statuses`.

    Raises:
        IncompatibleServer: the server is of another release.
        UnexpectedAnswer: it is not titopool's answer.
        TitopoolError: the server's error.
    """
    release = answer.headers.get(VERSION_HEADER.lower())
    if release is None:
        raise _unexpected(
            answer, f"the header {VERSION_HEADER}",
            f"check that a titopool server of release {series_of(RELEASE)} answers at this URL, and "
            "not a proxy",
        )  # fmt: skip
    if not are_compatible(RELEASE, release):
        raise IncompatibleServer(
            f"{answer.url}: expected a server of release {series_of(RELEASE)}, got {release}, and "
            f"this client is {RELEASE}; install the client's package with `pip install "
            f"'titopool=={series_of(release)}'`, or another server"
        )
    if answer.status not in statuses:
        raise error_of(answer)
    return answer


def error_of(answer: Answer) -> TitopoolError:
    """The error that the server sent: of the class with its code, else with its status."""
    try:
        sent = msgspec.json.decode(answer.content)["error"]
        code, message, param = str(sent["code"]), str(sent["message"]), sent.get("param")
    except (msgspec.DecodeError, TypeError, KeyError, AttributeError):
        return _unexpected(answer, "200 or titopool's error", "check that no proxy answers")
    nearest = InvalidRequest if 400 <= answer.status < 500 else TitopoolError
    kind = ERRORS_BY_CODE.get(code) or ERRORS_BY_STATUS.get(answer.status, nearest)
    error = kind(message, param=param, retry_after_s=_seconds(answer.headers.get("retry-after")))
    # The class has others, where it is only the nearest.
    vars(error).update(status=answer.status, code=code)
    return error


def json_answer(answer: Answer, kind: type[T]) -> T:
    """The JSON answer as a `kind`.

    Raises:
        UnexpectedAnswer: it is not one.
    """
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except msgspec.DecodeError as error:
        raise _unexpected(answer, f"JSON as {kind.__name__} has it ({error})") from None


def token_results(answer: Answer, sent: Sequence[np.ndarray | None], n: int) -> list[PromptResult]:
    """The results of /generate/ and /chat/ for `sent` prompts: their ids, or None.

    Raises:
        UnexpectedAnswer: it is not the binary answer to these prompts.
    """
    if answer.headers.get("content-type") != MSGPACK:
        raise _unexpected(answer, f"Content-Type {MSGPACK}")
    try:
        body = TOKENS_DECODER.decode(answer.content)
        prompts = [
            given if own is None else np.frombuffer(own, "<i4")
            for own, given in zip(body.prompt_ids, sent, strict=True)
        ]
        completions = [_completion(body, index, n) for index in range(len(body.completion_ids))]
        if len(completions) != n * len(prompts) or any(ids is None for ids in prompts):
            raise ValueError(f"{len(completions)} completions of {len(prompts)} prompts")
        return [
            PromptResult(
                ids,
                tuple(completions[index * n : (index + 1) * n]),
                num_cached,
                tuple(body.image_ranges[index]) if body.image_ranges else (),
            )
            for index, (ids, num_cached) in enumerate(
                zip(prompts, body.num_cached_tokens, strict=True)
            )
            if ids is not None
        ]
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        raise _unexpected(answer, f"the binary answer to {len(sent)} prompts ({error})") from None


def _completion(body: TokensBody, index: int, n: int) -> Completion:
    ids = np.frombuffer(body.completion_ids[index], "<i4")
    logprobs, top_ids, top_logprobs = _logprobs(body, index, ids)
    return Completion(
        ids, logprobs, top_ids, top_logprobs, body.finish_reasons[index],
        tuple(body.weight_versions[index]),
        body.lora_versions[index // n] if body.lora_versions else None,
        None if body.raw_logprobs is None else np.frombuffer(body.raw_logprobs[index], "<f4"),
        tuple(body.kv_from[index]) if body.kv_from else (),
    )  # fmt: skip


Ragged = tuple[np.ndarray, ...]


def _logprobs(
    body: TokensBody, index: int, ids: np.ndarray
) -> tuple[np.ndarray | None, Ragged | None, Ragged | None]:
    """The sampled tokens' log-probabilities, then the entries' ids and values at each token."""
    if body.logprobs is None:
        return None, None, None
    values = np.frombuffer(body.logprobs[index], "<f4")
    packed = body.logprob_token_ids[index] if body.logprob_token_ids else None
    if packed is None:
        if len(values) != len(ids):
            raise ValueError(f"{len(values)} log-probabilities of {len(ids)} tokens")
        return values, None, None
    entry_ids = np.frombuffer(packed, "<i4")
    count_bytes = body.num_logprobs[index] if body.num_logprobs else None
    counts = (
        np.ones(len(ids), np.int64) if count_bytes is None else np.frombuffer(count_bytes, "<i4")
    )
    if not len(counts) == len(ids) or not counts.sum() == len(entry_ids) == len(values):
        raise ValueError(f"{len(values)} log-probabilities of {len(ids)} tokens")
    sampled = sampled_of(ids, values, entry_ids, counts)
    ends = np.cumsum(counts)[:-1]
    if not len(ids):
        return sampled, (), ()
    return sampled, tuple(np.split(entry_ids, ends)), tuple(np.split(values, ends))


def samples_of(answer: Answer) -> list[SessionSample]:
    """The samples of /sessions/{id}/samples.

    Raises:
        UnexpectedAnswer: it is not the route's binary form.
    """
    if answer.headers.get("content-type") != MSGPACK:
        raise _unexpected(answer, f"Content-Type {MSGPACK}")
    try:
        return [_sample(one) for one in msgspec.msgpack.decode(answer.content)["samples"]]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise _unexpected(answer, f"the samples of a session ({error})") from None


def _sample(sent: dict[str, Any]) -> SessionSample:
    kinds = {"ids": "<i4", "loss_mask": "u1", "logprobs": "<f4"}
    arrays: dict[str, Any] = {name: np.frombuffer(sent[name], kind) for name, kind in kinds.items()}
    if len({len(one) for one in arrays.values()}) > 1:
        raise ValueError(f"other numbers of values than tokens: {arrays}")
    if (found := sent["routed_experts"]) is not None:
        experts = np.frombuffer(found["data"], np.dtype(found["dtype"]).newbyteorder("<"))
        arrays["routed_experts"] = experts.reshape(found["shape"])
    return msgspec.convert(sent | arrays, SessionSample)


def scores(answer: Answer) -> list[Score]:
    """The scores of /get_sequence_logprobs/.

    Raises:
        UnexpectedAnswer: it is not the route's binary form.
    """
    body = json_answer(answer, BinarySequencesAnswer)
    try:
        own = np.frombuffer(b64decode(body.actual_logprobs_b64), "<f4").reshape(body.shape[:2])
        top_ids = np.frombuffer(b64decode(body.token_ids_b64), "<i4").reshape(body.shape)
        top = np.frombuffer(b64decode(body.logprobs_b64), "<f4").reshape(body.shape)
    except ValueError as error:
        raise _unexpected(answer, f"arrays of shape {body.shape} ({error})") from None
    return [
        Score(own[index, :length], top_ids[index, :length], top[index, :length])
        for index, length in enumerate(body.completion_lengths)
    ]


def workers_of(answer: Answer) -> tuple[WorkerStatus, ...]:
    """What /ready says of each worker.

    Raises:
        UnexpectedAnswer: it is not that route's.
    """
    return tuple(
        WorkerStatus(one.worker, one.phase, one.phase_s, one.weight_version, one.reason or None)
        for one in json_answer(answer, Ready).workers
    )


def info_of(models: Answer, label: Answer) -> ServerInfo:
    """What /v1/models and /weight_info say.

    Raises:
        UnexpectedAnswer: an answer is not that route's.
    """
    served = json_answer(models, Models).data
    if not served:
        raise _unexpected(models, "a model")
    return ServerInfo(
        models.headers[VERSION_HEADER.lower()],
        served[0].id,
        served[0].max_model_len,
        {one.id: one.version or 0 for one in served[1:]},
        json_answer(label, WeightInfo).weight_version,
    )


def int32(ids: Sequence[int]) -> np.ndarray:
    """int32, [tokens]."""
    return np.array(ids, np.int32)


def _unexpected(answer: Answer, expected: str, remedy: str = "") -> UnexpectedAnswer:
    error = UnexpectedAnswer(
        f"{answer.url}: expected {expected}, got status {answer.status} with {answer.shown()}"
        f"{'; ' if remedy else ''}{remedy}",
        retry_after_s=_seconds(answer.headers.get("retry-after")),
    )
    vars(error).update(status=answer.status)
    return error


def _seconds(header: Any) -> int | None:
    return int(header) if header and header.isdecimal() else None
