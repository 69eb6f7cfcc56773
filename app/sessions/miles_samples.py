"""Samples as miles' trainer reads them: a safetensors file (radixark/miles,
`rollout/session/samples/codec.py`), written sample by sample."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from app.conversations.session_samples import SessionSample
from app.outputs.json_parts import short_json
from app.outputs.replay import rows_of
from app.sessions.bodies import SamplesBody
from app.sessions.exchanges import LabelOf, answer_id, mismatches

# Of `Sample.Status`, by the engine's finish reason.
STATUSES = {"stop": "completed", "length": "truncated", "abort": "aborted"}
SERVER_FIELDS = ("accumulated_token_ids", "tito_session_mismatch", "leaf")
DTYPES = {"int64": "I64", "float64": "F64", "int32": "I32", "uint8": "U8"}
META = "_samples_meta"
# Reads the samples anew at each call.
Samples = Callable[[], Iterator[SessionSample]]


def safetensors_of(
    samples: Samples,
    body: SamplesBody,
    metadata: dict[str, Any],
    decode: Callable[[np.ndarray], str],
    label_of: LabelOf,
) -> Iterator[bytes]:
    """The file in parts; samples that were retried are left out.

    Args:
        metadata: of the session, as miles has it.
        decode: the text of ids.
        label_of: as `app.pool.link.Link.label_of`.
    """
    described, was_any = list[dict[str, Any]](), False
    header, offset = dict[str, Any](), 0
    # An agent's metadata cannot replace what the server says.
    of_agent = {
        name: one for name, one in (body.metadata or {}).items() if name not in SERVER_FIELDS
    }
    for sample in samples():
        was_any = True
        num_ids, status = _end_of(sample, body.max_seq_len)
        if not num_ids or sample.was_retried:
            continue
        for name, array in _tensors(sample, num_ids).items():
            end = offset + array.nbytes
            header[f"{name}.{len(described)}"] = {
                "dtype": DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [offset, end],
            }  # fmt: skip
            offset = end
        described.append(_described(sample, num_ids, status, of_agent, decode, label_of))
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
        num_ids, _ = _end_of(sample, body.max_seq_len)
        if num_ids and not sample.was_retried:
            yield from (array.tobytes() for array in _tensors(sample, num_ids).values())
    yield meta


def _end_of(sample: SessionSample, max_seq_len: int | None) -> tuple[int, str]:
    """How many ids miles takes of a sample, and the sample's status: a turn that goes beyond `max_seq_len` is
    cut off, and those after it are left out; 0: not one sampled id is left."""
    num_ids, status = 0, ""
    for head in (turn.head for turn in sample.turns):
        if max_seq_len is not None and head.num_ids > max_seq_len:
            return (
                (max_seq_len, "truncated") if head.num_prompt < max_seq_len else (num_ids, status)
            )
        num_ids, status = head.num_ids, STATUSES.get(head.finish_reason, "failed")
    return num_ids, status


def _tensors(sample: SessionSample, num_ids: int) -> dict[str, np.ndarray]:
    response = slice(sample.prompt_length, num_ids)
    found = {
        "tokens": sample.ids[:num_ids].astype(np.int64),
        "loss_mask": sample.loss_mask[response],
        "rollout_log_probs": sample.logprobs[response].astype(np.float64),
    }
    if sample.routed_experts is not None:
        rows = rows_of(sample.routed_experts)[: num_ids - 1]
        found["rollout_routed_experts"] = rows.astype(np.int32)
    return found


def _described(
    sample: SessionSample,
    num_ids: int,
    status: str,
    of_agent: dict[str, Any],
    decode: Callable[[np.ndarray], str],
    label_of: LabelOf,
) -> dict[str, Any]:
    heads, last = [turn.head for turn in sample.turns], sample.turns[-1]
    leaf = {
        "node_id": last.number,
        "parent": last.parent,
        "path_node_ids": [turn.number for turn in sample.turns],
        "response_id": answer_id(last),
    }
    missing = () if sample.routed_experts else ("rollout_routed_experts",)
    return {
        "response": decode(sample.ids[sample.prompt_length : num_ids]),
        "response_length": num_ids - sample.prompt_length,
        "status": status,
        "weight_versions": [label_of(one) for head in heads for one, _ in head.weight_versions],
        "prefix_cache_info": {
            "cached_tokens": sum(head.num_cached for head in heads),
            "total_prompt_tokens": sum(head.num_prompt for head in heads),
        },
        "metadata": {**of_agent, "leaf": leaf, "tito_session_mismatch": mismatches(last)},
        "reward": of_agent.get("reward"),
        "nulls": ["rollout_indexer_topk", *missing],
    }
