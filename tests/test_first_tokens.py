"""First tokens are noticed in vLLM's own records of open requests; without an engine process."""

import asyncio

import pytest

from workers.engine.outputs.first_tokens import FirstTokens


@pytest.mark.parametrize("n", [1, 2])
def test_the_first_token_of_a_whole_output_is_noticed_once(n):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    processor = OutputProcessor(tokenizer=None, log_stats=False)
    params = SamplingParams(
        n=n, max_tokens=9, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    request = EngineCoreRequest(
        request_id="7-1", prompt_token_ids=[1, 2], mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None, external_req_id="7-1",
    )  # fmt: skip
    if n == 1:
        processor.add_request(request, prompt=None)
    else:
        parent = ParentRequest(request)
        for index in range(n):
            name, child_params = parent.get_child_info(index)
            child = EngineCoreRequest(**{
                field: getattr(request, field) for field in request.__struct_fields__
            })  # fmt: skip
            child.request_id, child.sampling_params = name, child_params
            processor.add_request(child, None, parent, index)

    async def story() -> list[int]:
        """How often the first token was noticed: before, after it, and later."""
        found: list[int] = []
        calls: list[str] = []
        first_tokens = FirstTokens(lambda: processor.request_states)
        with first_tokens.watched("7-1", lambda: calls.append("7-1")):
            for _ in range(3):
                await asyncio.sleep(0.15)
                found.append(len(calls))
                name = next(iter(processor.request_states))
                processor.process_outputs([EngineCoreOutput(name, [5])])
        return found

    assert asyncio.run(story()) == [0, 1, 1]
