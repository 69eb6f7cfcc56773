"""What updates read from vLLM's AsyncLLM, with a stand-in whose requests start and end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from titopool.errors import InvalidRequest, WeightUpdateFailed
from workers.engine.versions import Versions
from workers.engine.weights import MAX_SETTLES, VllmWeights


def state(request_id: str, num_tokens: int) -> Any:
    """A request with one sequence, as in vLLM's output processor."""
    detokenizer = SimpleNamespace(num_output_tokens=lambda: num_tokens)
    return SimpleNamespace(
        parent_req=None, external_req_id=request_id, detokenizer=detokenizer, request_index=0
    )


class Requests(dict[str, Any]):
    """vLLM's requests; `on_look` is called with the number of each read."""

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


def test_new_requests_do_not_prolong_a_pause():
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


def test_tokens_in_flight_are_awaited():
    versions = Versions()
    counts = iter([3, 4, 4, 4])

    def count(num_looks: int) -> None:
        # This process does not know the other request yet.
        requests[one] = state(one, next(counts))
        if num_looks == 2:
            requests[other] = state(other, 1)

    requests = Requests(count)
    with versions.request(1) as one, versions.request(2) as other:
        found = asyncio.run(weights(versions, requests).progress())
    assert found == {one: {0: 4}, other: {0: 1}}
    assert requests.num_looks == 3


def test_a_request_that_ends_is_not_awaited():
    versions = Versions()
    requests = Requests(lambda num_looks: versions.open.clear() if num_looks == 2 else None)
    versions.open.add("ends")
    assert asyncio.run(weights(versions, requests).progress()) == {}
    assert requests.num_looks == 2


def test_processes_that_disagree_end_the_session():
    engine = weights(Versions(), Requests(), [["refused", "no"], ["refused", "no"]])
    with pytest.raises(InvalidRequest, match="no"):
        asyncio.run(engine.call("begin"))
    # The other process is already receiving.
    engine = weights(Versions(), Requests(), [["ok", 1], ["refused", "no"]])
    with pytest.raises(WeightUpdateFailed, match="no"):
        asyncio.run(engine.call("begin"))
