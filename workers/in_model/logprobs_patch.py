"""Patches vLLM to send log-probabilities from its engine process to the worker as plain numbers.

vLLM (0.25.1 to 0.33) sends three NumPy arrays for each request and step, mostly of one element
each. Apart from the model, packing and unpacking them costs most for each token: 4 to 14 µs in the
process that receives them, 0.6 µs with this patch. Here the arrays of a step are converted to lists
once, and MessagePack carries the numbers. float32 values are exact as float64.

The two halves work only together: `send_lists` in the processes that hold the model, `receive_lists`
in the worker before it creates AsyncLLM. `workers/vllm_internals.py` lists the patched names.

With the setting `raw_logprobs`, the last column of each step is the sampled tokens' log-probability
by the model's logits, before temperature, penalties, top-k and top-p.
"""

from array import array
from typing import Any

# In the column of raw log-probabilities, in the place of a token's id.
RAW_ID = -1


def send_lists() -> None:
    """Patches this process to send lists."""
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    as_arrays = LogprobsTensors.tolists

    def as_lists(self: Any, *arguments: Any) -> Any:
        token_ids, values, ranks, ends = as_arrays(self, *arguments)
        return LogprobsLists(token_ids.tolist(), values.tolist(), ranks.tolist(), ends)

    LogprobsTensors.tolists = as_lists


def add_raw() -> None:
    """Patches this process's sampler to add the column of raw log-probabilities."""
    import torch
    from vllm.v1.sample.sampler import Sampler

    sample = Sampler.forward

    def forward(
        self: Any, logits: Any, sampling_metadata: Any, *arguments: Any, **options: Any
    ) -> Any:
        count = sampling_metadata.max_num_logprobs
        if count is None and not sampling_metadata.logprob_token_ids:
            return sample(self, logits, sampling_metadata, *arguments, **options)
        # vLLM changes logits in place if they are float32 already.
        raw = logits.clone() if logits.dtype == torch.float32 else logits
        normalizer = logits.float().logsumexp(-1, keepdim=True)
        output = sample(self, logits, sampling_metadata, *arguments, **options)
        chosen = raw.gather(-1, output.sampled_token_ids.long()).float() - normalizer
        tensors = output.logprobs_tensors
        output.logprobs_tensors = tensors._replace(
            logprob_token_ids=_with_column(
                tensors.logprob_token_ids, torch.full_like(chosen, RAW_ID)
            ),
            logprobs=_with_column(tensors.logprobs, chosen),
        )
        return output

    Sampler.forward = forward


def _with_column(rows: Any, column: Any) -> Any:
    import torch

    return torch.cat([rows, column.to(rows.dtype)], dim=-1)


def receive_lists(*, with_raw: bool = False) -> None:
    """Patches this process to receive lists into FlatLogprobs, without decoded tokens.

    Args:
        with_raw: the lists have the column of `add_raw`. Its values go to `raw`, an attribute that
            vLLM's class does not have.
    """
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    # msgspec reads the annotations when it creates the decoder; Any takes MessagePack's lists.
    for name in ("logprob_token_ids", "logprobs", "sampled_token_ranks"):
        LogprobsLists.__annotations__[name] = Any

    def update(self: Any, lists: Any) -> None:
        flat: FlatLogprobs = self.logprobs
        if isinstance(flat.token_ids, list):
            # As lists of Python's numbers an entry takes 96 bytes, so 12.
            flat.token_ids, flat.ranks, flat.logprobs = array("i"), array("i"), array("f")
            flat.start_indices, flat.end_indices = array("q"), array("q")
        # A step has as many columns as its largest request needs: the sampled token, then the best k.
        count = None if self.num_logprobs == -1 else self.num_logprobs + 1
        for token_ids, values, rank in zip(*lists[:3], strict=True):
            self.cumulative_logprob += values[0]
            flat.start_indices.append(len(flat.logprobs))
            flat.token_ids.extend(token_ids[:count])
            flat.logprobs.extend(values[:count])
            flat.ranks.append(rank)
            flat.end_indices.append(len(flat.logprobs))
            flat.ranks.extend(range(1, len(flat.logprobs) - len(flat.ranks) + 1))

    def update_with_raw(self: Any, lists: Any) -> None:
        update(self, lists)
        raw = self.logprobs.__dict__.setdefault("raw", array("f"))
        columns = zip(*lists[:2], strict=True)
        # Without the column, the front end finds too few values and says so.
        raw.extend(values[-1] for token_ids, values in columns if token_ids[-1] == RAW_ID)

    LogprobsProcessor._update_sample_logprobs = update_with_raw if with_raw else update
