"""Samples as miles' trainer reads them: a safetensors file (radixark/miles,
`rollout/session/samples/codec.py`), written sample by sample."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from app.conversations.session_samples import SessionSample
from app.conversations.store import Turn
from app.outputs.json_parts import short_json
from app.outputs.replay import parts_of, rows_of
from app.sessions.bodies import SamplesBody
from app.sessions.exchanges import LabelOf, answer_id, mismatches

# Of `Sample.Status`, by the finish reason; others have failed.
STATUSES = {
    "stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted",
}  # fmt: skip
# An agent's metadata cannot replace what the server says.
SERVER_FIELDS = ("accumulated_token_ids", "tito_session_mismatch", "leaf")
DTYPES: dict[type, str] = {np.int64: "I64", np.float64: "F64", np.int32: "I32", np.uint8: "U8"}
META = "_samples_meta"
# Reads the samples anew at each call.
Samples = Callable[[], Iterator[SessionSample]]


class Cut(NamedTuple):
    """What miles takes of a sample (its `truncate_samples_by_total_tokens`)."""

    turns: list[Turn]
    num_ids: int
    status: str


def safetensors_of(
    samples: Samples,
    body: SamplesBody,
    metadata: dict[str, Any],
    decode: Callable[[np.ndarray], str],
    label_of: LabelOf,
) -> Iterator[bytes]:
    """The file in parts.

    Args:
        metadata: of the session, as miles has it.
        decode: the text of ids.
        label_of: as `app.pool.link.Link.label_of`.
    """
    described, was_any = list[dict[str, Any]](), False
    header, offset = dict[str, Any](), 0
    of_agent = {
        name: one for name, one in (body.metadata or {}).items() if name not in SERVER_FIELDS
    }
    for sample in samples():
        was_any = True
        if (cut := _cut(sample, body.max_seq_len)) is None:
            continue
        for name, (array, dtype) in _tensors(sample, cut.num_ids).items():
            end = offset + array.size * np.dtype(dtype).itemsize
            header[f"{name}.{len(described)}"] = {
                "dtype": DTYPES[dtype], "shape": array.shape, "data_offsets": [offset, end],
            }  # fmt: skip
            offset = end
        described.append(_described(sample, cut, of_agent, decode, label_of))
    empty = None if described else "all_truncated" if was_any else "no_records"
    meta = short_json({"samples": described, "session_metadata": metadata, "empty_reason": empty})
    header[META] = {
        "dtype": "U8", "shape": [len(meta)], "data_offsets": [offset, offset + len(meta)],
    }  # fmt: skip
    head = short_json(header)
    # The tensors begin at a multiple of 8 bytes.
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little") + head
    for sample in samples():
        if cut := _cut(sample, body.max_seq_len):
            for array, dtype in _tensors(sample, cut.num_ids).values():
                yield from parts_of(array, dtype)
    yield meta


def _cut(sample: SessionSample, max_seq_len: int | None) -> Cut | None:
    """The turns up to the one that goes beyond `max_seq_len`, which ends there; None: no sampled id is left."""
    num_turns, num_ids, status = 0, 0, ""
    limit = len(sample.ids) if max_seq_len is None else max_seq_len
    for head in (turn.head for turn in sample.turns):
        if head.num_ids > limit and head.num_prompt >= limit:
            break
        num_turns += 1
        num_ids, status = head.num_ids, STATUSES.get(head.finish_reason, "failed")
        if num_ids > limit:
            num_ids, status = limit, "truncated"
            break
    if num_ids <= sample.prompt_length:
        return None
    return Cut(sample.turns[:num_turns], num_ids, status)


def _tensors(sample: SessionSample, num_ids: int) -> dict[str, tuple[np.ndarray, type]]:
    """Arrays, and the types that the file has of them."""
    response = slice(sample.prompt_length, num_ids)
    found: dict[str, tuple[np.ndarray, type]] = {
        "tokens": (sample.ids[:num_ids], np.int64),
        "loss_mask": (sample.loss_mask[response], np.uint8),
        "rollout_log_probs": (sample.logprobs[response], np.float64),
    }
    if sample.routed_experts is not None:
        rows = rows_of(sample.routed_experts)[: num_ids - 1]
        found["rollout_routed_experts"] = rows, np.int32
    return found


def _described(
    sample: SessionSample,
    cut: Cut,
    of_agent: dict[str, Any],
    decode: Callable[[np.ndarray], str],
    label_of: LabelOf,
) -> dict[str, Any]:
    heads, last = [turn.head for turn in cut.turns], sample.turns[-1]
    leaf = {
        "node_id": last.number,
        "parent": last.parent,
        "path_node_ids": [turn.number for turn in sample.turns],
        "response_id": answer_id(last),
    }
    missing = () if sample.routed_experts is not None else ("rollout_routed_experts",)
    return {
        "response": decode(sample.ids[sample.prompt_length : cut.num_ids]),
        "response_length": cut.num_ids - sample.prompt_length,
        "status": cut.status,
        "weight_versions": [
            label_of(version)
            for head in heads
            for version, index in head.weight_versions
            if head.num_prompt + index < cut.num_ids
        ],
        "prefix_cache_info": {
            "cached_tokens": sum(head.num_cached for head in heads),
            "total_prompt_tokens": sum(head.num_prompt for head in heads),
        },
        "metadata": {**of_agent, "leaf": leaf, "tito_session_mismatch": mismatches(cut.turns)},
        "reward": of_agent.get("reward"),
        "nulls": ["rollout_indexer_topk", *missing],
    }
