"""Log-probabilities from vLLM's engine core to the worker's process, as plain numbers.

vLLM (0.25.1 to 0.32) sends three NumPy arrays for each request and step, mostly of one element
each. Packing and unpacking them is the largest cost for each token beside the model: 4 to 14 µs
in the process that receives them, where this takes 0.6. Here the arrays of a step become lists
once, and MessagePack carries their numbers. float32 values are exact as float64.

Both halves change vLLM's classes in place, by names that it does not promise; each raises
AttributeError where they are gone. They only work together: `send_lists` in the process that
runs the model, `receive_lists` in the one that owns AsyncLLM, before it is made.
"""

from typing import Any


def send_lists() -> None:
    """Makes the model's process hand on lists."""
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    as_arrays = LogprobsTensors.tolists

    def as_lists(self: Any, *arguments: Any) -> Any:
        token_ids, values, ranks, ends = as_arrays(self, *arguments)
        return LogprobsLists(token_ids.tolist(), values.tolist(), ranks.tolist(), ends)

    LogprobsTensors.tolists = as_lists


def receive_lists() -> None:
    """Makes this process expect lists, for FlatLogprobs; decoded tokens are left out."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    # msgspec reads them when the decoder is made: whatever MessagePack holds is taken as it is.
    for name in ("logprob_token_ids", "logprobs", "sampled_token_ranks"):
        if name not in LogprobsLists.__annotations__:
            raise AttributeError(f"vLLM's LogprobsLists has no field {name}")
        LogprobsLists.__annotations__[name] = Any

    def update(self: Any, lists: Any) -> None:
        flat: FlatLogprobs = self.logprobs
        # The sampled token and the best k; a step carries as many as its greediest request.
        count = None if self.num_logprobs == -1 else self.num_logprobs + 1
        for token_ids, values, rank in zip(*lists[:3], strict=True):
            self.cumulative_logprob += values[0]
            flat.start_indices.append(len(flat.logprobs))
            flat.token_ids.extend(token_ids[:count])
            flat.logprobs.extend(values[:count])
            flat.ranks.append(rank)
            flat.end_indices.append(len(flat.logprobs))
            flat.ranks.extend(range(1, len(flat.logprobs) - len(flat.ranks) + 1))

    if not hasattr(LogprobsProcessor, "_update_sample_logprobs"):
        raise AttributeError("vLLM's LogprobsProcessor has no method _update_sample_logprobs")
    LogprobsProcessor._update_sample_logprobs = update
