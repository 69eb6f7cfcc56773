"""The checked request of `POST /generate` in SGLang's form, and the objects of its response."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from app.generation import Prompt, expanded_ids
from app.inputs.admission import Admission
from app.outputs.openai_logprobs import finite, positions
from app.outputs.replay import experts_int32
from app.outputs.run_facts import RunFacts
from app.outputs.token_arrays import prompt_rows, weight_spans
from app.outputs.token_texts import MAX_BEFORE, TextLookup, TokenTexts
from app.schemas.sglang import RequestFields, SGLangPrompt
from app.time_slices import sharing_time
from titopool.errors import InvalidRequest
from titopool.wire.messages import Completed, Completion, WorkerFacts

# [log-probability, token id, text or null]
Entry = list[Any]


class PromptRequest(NamedTuple):
    """A checked prompt with what is answered about it."""

    sent: SGLangPrompt
    # With options, adapter and id of its own.
    prompt: Prompt
    # The index of its first completion in the answer.
    start: int


class SGLangRequest(NamedTuple):
    """A checked request in SGLang's form."""

    admission: Admission
    fields: RequestFields
    prompts: Sequence[PromptRequest]
    # Whether the answer is a list.
    is_list: bool
    # None: log-probabilities are shown without texts.
    texts: TokenTexts | None


@dataclass
class Gained:
    """A completion as far as it has come."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    token_logprobs: list[Entry] = field(default_factory=list)
    # By position.
    top_logprobs: list[list[Entry]] = field(default_factory=list)
    chosen_logprobs: list[list[Entry]] = field(default_factory=list)

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
        weights, label_of = request.admission.link.weights, request.admission.link.label_of
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
            message = "Aborted" if self.ids else "Abort before prefill"
            return {"type": "abort", "message": message, "status_code": None, "err_type": None}
        if piece.finish_reason == "length" or one.sent.is_scored_only:
            return {"type": "length", "length": len(self.ids)}
        # Without a stop reason, the end-of-text token has ended the completion.
        last = self.ids[-1] if self.ids else None
        return {"type": "stop", "matched": last if piece.stop_reason is None else piece.stop_reason}


def whole_answer(
    request: SGLangRequest, results: Sequence[Completed]
) -> dict[str, Any] | list[dict[str, Any]]:
    """The response body of a request that is not streamed: the n completions of prompt 0 first."""
    shown = []
    all_ids = expanded_ids([one.prompt for one in request.prompts], results)
    for one, ids, result in sharing_time(zip(request.prompts, all_ids, results, strict=True)):
        facts = RunFacts(ids, result.image_ranges, result.num_cached_tokens, result.adapter_version)
        inputs = _inputs(request, one, ids, result)
        for completion in sharing_time(result.completions):
            gained = Gained()
            gained.add(request, one, completion)
            shown.append(gained.shown(request, one, facts, completion))
            shown[-1]["meta_info"] |= inputs
    return shown if request.is_list else shown[0]


def _inputs(
    request: SGLangRequest, one: PromptRequest, ids: np.ndarray, result: Completed
) -> dict[str, Any]:
    """The prompt's log-probabilities from `logprob_start_len` on; null where nothing is before.

    SGLang itself answers null at the first one that was asked for, although it has a value.
    """
    options, start = one.prompt.options, one.sent.fields.logprob_start_len
    if options is None or options.prompt_logprobs is None:
        return {}
    k = options.prompt_logprobs
    check_start(one.sent, len(ids))
    rows = prompt_rows(result, one.prompt.location, num_tokens=len(ids), k=k)
    lookup = request.texts.of_prompt(result, ids, k + 1) if request.texts else None
    values, token_ids = rows.values.tolist(), rows.token_ids.tolist()
    own: list[Entry] = []
    best: list[list[Entry] | None] = []
    for end in sharing_time(range(start, len(ids))):
        if end == 0:
            own.append([None, int(ids[0]), None])
            best.append(None)
            continue
        row = zip(token_ids[end - 1], values[end - 1], strict=True)
        (itself, *others) = (_entry(lookup, end, name, value) for name, value in row)
        own.append(itself)
        best.append(others)
    return {"input_token_logprobs": own} | ({"input_top_logprobs": best} if k else {})


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
    if fields.return_routed_experts and not facts.has_routed_experts:
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
    return [finite(value), token_id, lookup and lookup.text(end, token_id)]
