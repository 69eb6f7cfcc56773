"""First tokens are noticed in vLLM's own records of open requests; without an engine process."""

import asyncio

from workers.engine.outputs.first_tokens import FirstTokens


def test_the_first_token_of_a_whole_output_is_noticed_once():
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    processor = OutputProcessor(tokenizer=None, log_stats=False)
    params = SamplingParams(
        max_tokens=9, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    request = EngineCoreRequest(
        request_id="7-1", prompt_token_ids=[1, 2], mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None, external_req_id="7-1",
    )  # fmt: skip
    processor.add_request(request, prompt=None)

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
