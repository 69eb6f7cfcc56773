"""What vLLM would do for each completion or step: entries of log-probabilities, tokens of bad words."""

import numpy as np
import pytest

from titopool.settings.sampling import SamplingOptions
from workers.engine.sampling import params_of_other, to_vllm_params
from workers.in_model.logprobs_patch import receive_lists

NUM_POSITIONS = 5


def processor(num_logprobs: int):
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    return LogprobsProcessor(
        tokenizer=None, logprobs=FlatLogprobs(), prompt_logprobs=None, cumulative_logprob=0.0,
        num_logprobs=num_logprobs, num_prompt_logprobs=None,
    )  # fmt: skip


# A step has the columns of its request with the most logprobs: up to two more than asked for.
@pytest.mark.parametrize("num_logprobs, num_columns", [(0, 1), (0, 3), (3, 4), (3, 6), (-1, 8)])
def test_lists_give_the_entries_that_vllm_records(num_logprobs, num_columns, monkeypatch):
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    rng = np.random.default_rng(num_columns)
    shape = (NUM_POSITIONS, num_columns)
    arrays = LogprobsLists(
        rng.integers(0, 1000, shape).astype(np.int32),
        rng.normal(size=shape).astype(np.float32),
        rng.integers(1, 1000, NUM_POSITIONS),
    )
    theirs, ours = processor(num_logprobs), processor(num_logprobs)
    theirs._update_sample_logprobs(arrays)

    # Restores vLLM's method for the next case. The fields' types stay patched, but nothing else in
    # this process decodes them.
    monkeypatch.setattr(
        LogprobsProcessor, "_update_sample_logprobs", LogprobsProcessor._update_sample_logprobs
    )
    receive_lists()
    lists = LogprobsLists(*(one.tolist() for one in arrays[:3]))
    output = EngineCoreOutput(request_id="1", new_token_ids=[1], new_logprobs=lists)
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))
    received = MsgpackDecoder(EngineCoreOutputs).decode([bytes(one) for one in frames])
    ours._update_sample_logprobs(received.outputs[0].new_logprobs)

    for name in ("token_ids", "logprobs", "ranks", "start_indices", "end_indices"):
        # Arrays, whose entries take an eighth of the memory.
        assert getattr(ours.logprobs, name).tolist() == getattr(theirs.logprobs, name)
    assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob)


def test_bad_words_are_tokenized_once_for_all_completions():
    class Tokenizer:
        max_token_id = 1000
        calls = 0

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            self.calls += 1
            return [len(text), ord(text[-1])]

    tokenizer = Tokenizer()
    params = to_vllm_params(SamplingOptions(bad_words=["ab", "cde"], stop_token_ids=[3]))
    found = []
    for index in range(4):
        one = params_of_other(params, index).clone()
        one.update_from_tokenizer(tokenizer)
        one.max_tokens = index
        found.append(one.bad_words_token_ids)
    assert found == [[[2, 98], [3, 98], [3, 101], [4, 101]]] * 4
    assert tokenizer.calls == 4
    assert params.max_tokens == 16
