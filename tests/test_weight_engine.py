"""What updates ask of vLLM's AsyncLLM, with a stand-in whose requests come and go."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from titopool.errors import InvalidRequest, WeightUpdateFailed
from workers.engine.versions import Versions
from workers.engine.weights import MAX_SETTLES, VllmWeights


def state(request_id: str, num_tokens: int) -> Any:
    """A request of one sequence, as vLLM's output processor has it."""
    detokenizer = SimpleNamespace(num_output_tokens=lambda: num_tokens)
    return SimpleNamespace(
        parent_req=None, external_req_id=request_id, detokenizer=detokenizer, request_index=0
    )


class Requests(dict[str, Any]):
    """vLLM's requests; `on_look` is called with the number of each look at them."""

    def __init__(self, on_look: Any = None):
        super().__init__()
        self.num_looks = 0
        self._on_look = on_look

    def values(self) -> Any:
        self.num_looks += 1
        if self._on_look is not None:
            self._on_look(self.num_looks)
        return list(super().values())


def weights(versions: Versions, requests: Requests, answers: Any = None) -> VllmWeights:
    async def collective_rpc(*_: Any, **__: Any) -> Any:
        return answers

    llm: Any = SimpleNamespace(
        model_config=SimpleNamespace(is_multimodal_model=False),
        output_processor=SimpleNamespace(request_states=requests),
        collective_rpc=collective_rpc,
    )
    return VllmWeights(llm, versions)


def test_requests_that_arrive_while_the_engine_stands_do_not_prolong_it():
    versions = Versions()

    def arrive(num_looks: int) -> None:
        name = f"new-{num_looks}"
        versions.open.add(name)
        requests[name] = state(name, 0)

    requests = Requests(arrive)
    with versions.request(1) as request_id:
        requests[request_id] = state(request_id, 5)
        found = asyncio.run(weights(versions, requests).progress())
    assert found == {request_id: {0: 5}}
    assert requests.num_looks == 2 < MAX_SETTLES


def test_tokens_that_are_still_on_their_way_are_waited_for():
    versions = Versions()
    counts = iter([3, 4, 4, 4])

    def count(num_looks: int) -> None:
        # Of the other one, the engine has not told this process yet.
        requests[one] = state(one, next(counts))
        if num_looks == 2:
            requests[other] = state(other, 1)

    requests = Requests(count)
    with versions.request(1) as one, versions.request(2) as other:
        found = asyncio.run(weights(versions, requests).progress())
    assert found == {one: {0: 4}, other: {0: 1}}
    assert requests.num_looks == 3


def test_a_request_that_ends_meanwhile_is_not_waited_for():
    versions = Versions()
    requests = Requests(lambda num_looks: versions.open.clear() if num_looks == 2 else None)
    versions.open.add("ends")
    assert asyncio.run(weights(versions, requests).progress()) == {}
    assert requests.num_looks == 2


def test_what_one_process_refuses_and_another_takes_ends_the_session():
    mine = weights(Versions(), Requests(), [["refused", "no"], ["refused", "no"]])
    with pytest.raises(InvalidRequest, match="no"):
        asyncio.run(mine.call("begin"))
    # The other one receives by now.
    mine = weights(Versions(), Requests(), [["ok", 1], ["refused", "no"]])
    with pytest.raises(WeightUpdateFailed, match="no"):
        asyncio.run(mine.call("begin"))
