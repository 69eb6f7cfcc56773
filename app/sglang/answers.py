"""Answers of SGLang's routes, whole and as events of streams, and how they are made."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from app.call.call import Call
from app.call.jobs import Prompt, expanded_ids
from app.call.openai_logprobs import finite, numbers, positions
from app.call.token_texts import MAX_BEFORE, TextLookup, TokenTexts
from app.outputs.answer_parts import WeightSpan
from app.outputs.json_parts import Rows, json_parts
from app.outputs.replay import experts_int32
from app.outputs.run_facts import RunFacts
from app.outputs.token_arrays import (
    PromptRows,
    given_up,
    prompt_rows,
    sampled_logprobs,
    weight_spans,
)
from app.sglang.bodies import RequestFields, SGLangPrompt
from app.time_slices import sharing_time
from titopool.answers.weights import Seconds
from titopool.errors import InvalidRequest
from titopool.wire.messages import Completed, Completion, WorkerFacts

# Log-probability, token id, text. A prompt's first token has no log-probability.
Entry = tuple[float | None, int, str | None]


class SGLangFinish(msgspec.Struct, kw_only=True):
    """Why a completion has ended."""

    type: Literal["stop", "length", "abort"]
    # Of stop: the token or the text.
    matched: int | str | UnsetType | None = UNSET
    length: int | UnsetType = UNSET
    # Of abort.
    message: str | UnsetType = UNSET
    status_code: UnsetType | None = UNSET
    err_type: UnsetType | None = UNSET


class SGLangMeta(msgspec.Struct, kw_only=True):
    """Facts of a completion, and the log-probabilities that were asked for."""

    id: str
    finish_reason: SGLangFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[WeightSpan]
    lora_version: int | UnsetType | None = UNSET
    input_token_logprobs: list[Entry] | UnsetType = UNSET
    output_token_logprobs: list[Entry] | UnsetType = UNSET
    input_top_logprobs: list[list[Entry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Entry]] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Entry]] | UnsetType = UNSET
    # base64 of int32, [tokens, layers, experts of a token]; null without the server's option.
    routed_experts: str | UnsetType | None = UNSET


class SGLangCompletion(msgspec.Struct, kw_only=True):
    """A completion; in events of a stream as far as it has come."""

    text: str
    output_ids: list[int]
    meta_info: SGLangMeta
    prompt_token_ids: list[int] | UnsetType = UNSET
    # In events of several completions.
    index: int | UnsetType = UNSET


class SGLangPaused(msgspec.Struct, kw_only=True):
    """All workers are paused."""

    message: str
    status: Literal["ok"]
    lease_s: Seconds


class SGLangResumed(msgspec.Struct, kw_only=True):
    """Generation goes on."""

    message: str
    status: Literal["ok"]


class DiskAnswer(msgspec.Struct, kw_only=True):
    """All workers serve the folder's weights."""

    success: bool
    message: str
    num_paused_requests: int


# ---- how they are made ----------------------------------------------------------------------


class PromptRequest(NamedTuple):
    """A checked prompt with what is answered about it."""

    sent: SGLangPrompt
    # With options, adapter and id of its own.
    prompt: Prompt
    # The index of its first completion in the answer.
    start: int


class SGLangRequest(NamedTuple):
    """A checked request in SGLang's form."""

    call: Call
    fields: RequestFields
    prompts: Sequence[PromptRequest]
    # Whether the answer is a list.
    is_list: bool
    # None: log-probabilities are shown without texts.
    texts: TokenTexts | None


@dataclass
class Gained:
    """A completion as far as it has come; of a whole one, `Rows` that are made as they are written."""

    # list[int], or int32.
    ids: Any = field(default_factory=list)
    text: str = ""
    # list[Entry]
    token_logprobs: Any = field(default_factory=list)
    # list[list[Entry]], by position.
    top_logprobs: Any = field(default_factory=list)
    chosen_logprobs: Any = field(default_factory=list)

    def add(self, request: SGLangRequest, one: PromptRequest, piece: Completion) -> None:
        """Adds a chunk of a completion, or a whole one."""
        fields, before = one.sent.fields, self.ids[-MAX_BEFORE:]
        if one.sent.is_scored_only:
            return
        self.ids += np.frombuffer(piece.token_ids, np.int32).tolist()
        self.text += piece.text
        if not fields.return_logprob:
            return
        lookup = request.texts.of_completion(piece, before) if request.texts else None
        for end, (token_id, found) in enumerate(positions(piece), len(before)):
            entries = {name: _entry(lookup, end, name, value) for name, value in found.items()}
            self.token_logprobs.append(entries[token_id])
            self.top_logprobs.append(list(entries.values())[: fields.top_logprobs_num])
            chosen = fields.token_ids_logprob or ()
            self.chosen_logprobs.append([entries[name] for name in chosen])

    def shown(
        self, request: SGLangRequest, one: PromptRequest, facts: RunFacts, piece: Completion
    ) -> dict[str, Any]:
        """The object of a completion; `piece` is its last chunk, or all of it."""
        fields = one.sent.fields
        weights, label_of = request.call.link.weights, request.call.link.label_of
        spans = weight_spans(piece, len(self.ids), label_of)
        meta = {
            "id": one.prompt.client_id,
            "finish_reason": self._finish_reason(one, piece),
            "prompt_tokens": len(facts.prompt_ids),
            "completion_tokens": len(self.ids),
            "cached_tokens": facts.num_cached,
            "weight_version": spans[-1]["version"] if spans else label_of(weights.version),
            "weight_versions": spans,
        }
        if one.prompt.adapter:
            meta["lora_version"] = facts.adapter_version
        if fields.return_logprob:
            meta |= {"input_token_logprobs": [], "output_token_logprobs": self.token_logprobs}
            if fields.top_logprobs_num:
                meta |= {"input_top_logprobs": [], "output_top_logprobs": self.top_logprobs}
            if fields.token_ids_logprob:
                meta["output_token_ids_logprobs"] = self.chosen_logprobs
        if request.fields.return_routed_experts and piece.routed_experts is not None:
            start = request.fields.routed_experts_start_len
            # The last token has no row.
            num_rows = max(0, len(facts.prompt_ids) + len(self.ids) - 1 - start)
            sent = experts_int32(piece.routed_experts, start=start, num_rows=num_rows)
            meta |= {} if sent is None else {"routed_experts": sent}
        shown = {"text": self.text, "output_ids": self.ids, "meta_info": meta}
        if request.fields.return_prompt_token_ids:
            shown["prompt_token_ids"] = facts.prompt_ids.tolist()
        return shown

    def _finish_reason(self, one: PromptRequest, piece: Completion) -> dict[str, Any] | None:
        if not piece.finish_reason:
            return None
        if piece.finish_reason == "abort":
            # AReaL looks for the words that say that there is no token.
            message = "Aborted" if len(self.ids) else "Abort before prefill"
            return {"type": "abort", "message": message, "status_code": None, "err_type": None}
        if piece.finish_reason == "length" or one.sent.is_scored_only:
            return {"type": "length", "length": len(self.ids)}
        # Without a stop reason, the end-of-text token has ended the completion.
        last = int(self.ids[-1]) if len(self.ids) else None
        return {"type": "stop", "matched": last if piece.stop_reason is None else piece.stop_reason}


def whole_answer(request: SGLangRequest, results: list[Completed]) -> Iterator[bytes]:
    """The response body of a request that is not streamed, as JSON in parts: the n completions of
    prompt 0 first. Empties `results`.

    Raises:
        TitopoolError: as `_check_inputs`.
    """
    all_ids = expanded_ids([one.prompt for one in request.prompts], results)
    for one, ids, result in sharing_time(zip(request.prompts, all_ids, results, strict=True)):
        # Before the head is sent: afterwards, an error would cut the answer.
        _rows_of_prompt(one, ids, result)
    shown = _completions(request, all_ids, results)
    return json_parts(shown if request.is_list else next(shown))


def _completions(
    request: SGLangRequest, all_ids: Sequence[np.ndarray], results: list[Completed]
) -> Iterator[dict[str, Any]]:
    results.reverse()
    for one, ids in zip(request.prompts, all_ids, strict=True):
        result = results.pop()
        facts = RunFacts(ids, result.image_ranges, result.num_cached_tokens, result.adapter_version)
        for completion in given_up(result.completions):
            shown = _whole(request, one, completion).shown(request, one, facts, completion)
            shown["meta_info"] |= _inputs(request, one, ids, result)
            yield shown


def _whole(request: SGLangRequest, one: PromptRequest, completion: Completion) -> "Gained":
    """A whole completion, whose log-probabilities are made as they are written."""
    fields = one.sent.fields
    if one.sent.is_scored_only:
        return Gained()
    gained = Gained(np.frombuffer(completion.token_ids, np.int32), completion.text)
    if fields.return_logprob:
        lookup = request.texts.of_completion(completion) if request.texts else None
        values = numbers(sampled_logprobs(completion))
        own = enumerate(zip(numbers(gained.ids), values, strict=True))
        gained.token_logprobs = Rows(_entry(lookup, end, *entry) for end, entry in own)
        if fields.top_logprobs_num:
            gained.top_logprobs = Rows(_best(lookup, completion, fields.top_logprobs_num))
        if fields.token_ids_logprob:
            gained.chosen_logprobs = Rows(_chosen(lookup, completion, fields.token_ids_logprob))
    return gained


def _best(
    lookup: TextLookup | None, completion: Completion, k: int, before: int = 0
) -> Iterator[list[Entry]]:
    for end, (_, found) in enumerate(positions(completion), before):
        yield [_entry(lookup, end, *entry) for entry in islice(found.items(), k)]


def _chosen(
    lookup: TextLookup | None, completion: Completion, chosen: Sequence[int], before: int = 0
) -> Iterator[list[Entry]]:
    for end, (_, found) in enumerate(positions(completion), before):
        yield [_entry(lookup, end, name, found[name]) for name in chosen]


def _rows_of_prompt(one: PromptRequest, ids: np.ndarray, result: Completed) -> PromptRows | None:
    """The prompt's log-probabilities; None if the client wants none.

    Raises:
        InvalidRequest: as `check_start`.
        GenerationFailed: as `prompt_rows`.
    """
    options = one.prompt.options
    if options is None or options.prompt_logprobs is None:
        return None
    check_start(one.sent, len(ids))
    k = options.prompt_logprobs
    return prompt_rows(result, one.prompt.location, num_tokens=len(ids), k=k)


def _inputs(
    request: SGLangRequest, one: PromptRequest, ids: np.ndarray, result: Completed
) -> dict[str, Any]:
    """The prompt's log-probabilities from `logprob_start_len` on; null where nothing is before.

    SGLang itself answers null at the first one that was asked for, although it has a value.
    """
    rows, start = _rows_of_prompt(one, ids, result), one.sent.fields.logprob_start_len
    if rows is None:
        return {}
    k = rows.values.shape[1] - 1
    lookup = request.texts.of_prompt(result, ids, k + 1) if request.texts else None
    # The engine's rows begin at the second token.
    first = max(1, start)

    def own() -> Iterator[Entry]:
        if start == 0 and len(ids):
            yield None, int(ids[0]), None
        entries = zip(
            numbers(rows.token_ids[first - 1 :, 0]),
            numbers(rows.values[first - 1 :, 0]),
            strict=True,
        )
        for end, entry in enumerate(entries, first):
            yield _entry(lookup, end, *entry)

    def best() -> Iterator[list[Entry] | None]:
        if start == 0 and len(ids):
            yield None
        pairs = zip(
            numbers(rows.token_ids[first - 1 :, 1:]),
            numbers(rows.values[first - 1 :, 1:]),
            strict=True,
        )
        for end, (names, values) in enumerate(pairs, first):
            yield [_entry(lookup, end, *entry) for entry in zip(names, values, strict=True)]

    found = {"input_token_logprobs": Rows(own())}
    return found | ({"input_top_logprobs": Rows(best())} if k else {})


def check_start(sent: SGLangPrompt, num_tokens: int) -> None:
    """Raises InvalidRequest if `logprob_start_len` is after the end of a prompt of `num_tokens`."""
    if sent.fields.logprob_start_len > num_tokens:
        raise InvalidRequest(
            f"logprob_start_len: expected at most {num_tokens}, the number of tokens of "
            f"{sent.location}, got {sent.fields.logprob_start_len}",
            param="logprob_start_len",
        )


def check_experts(fields: RequestFields, facts: WorkerFacts) -> None:
    """Raises InvalidRequest for routed experts if the server does not return them."""
    if fields.return_routed_experts and not facts.routed_expert_bytes:
        raise InvalidRequest(
            "return_routed_experts: this server does not return routed experts; start it with a "
            "mixture of experts and --enable-return-routed-experts, or leave the field out",
            param="return_routed_experts",
        )


def check_experts_start(start: int, location: str, num_tokens: int) -> None:
    """Raises InvalidRequest if `start` is after the end of a prompt of `num_tokens`."""
    if start > num_tokens:
        raise InvalidRequest(
            f"routed_experts_start_len: expected at most {num_tokens}, the number of tokens of "
            f"{location}, got {start}",
            param="routed_experts_start_len",
        )


def _entry(lookup: TextLookup | None, end: int, token_id: int, value: float) -> Entry:
    return finite(value), token_id, lookup.text(end, token_id) if lookup else None
