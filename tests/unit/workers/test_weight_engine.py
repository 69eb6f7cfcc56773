"""What updates read from vLLM's AsyncLLM, with a stand-in whose requests start and end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from titopool.errors import InvalidRequest, WeightUpdateFailed
from workers.engine.versions import Versions
from workers.engine.weights import MAX_SETTLES, VllmWeights


def state(request_id: str, num_tokens: int) -> Any:
    """A request, as in vLLM's output processor."""
    detokenizer = SimpleNamespace(num_output_tokens=lambda: num_tokens)
    return SimpleNamespace(external_req_id=request_id, detokenizer=detokenizer)


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


def test_requests_in_flight_alone_read_keys_that_were_kept():
    versions = Versions()
    with versions.request(1) as old, versions.request(2) as unknown:
        assert (versions.cache_salt(None), versions.cache_salt("a")) == (None, "0:a")
        assert versions.keep_keys([old]) == []
        assert (versions.cache_salt(None), versions.cache_salt("a")) == ("1", "1:a")
        with versions.request(3) as new:
            # The engine does not have the second one yet.
            versions.switch(5, {old: 10, new: 0})
            history = versions.history(old)
            assert (history.spans(12), history.kv_from(12)) == ([(0, 0), (5, 10)], [0, 0])
            assert (history.spans(10), history.kv_from(10)) == ([(0, 0)], [])
            history = versions.history(unknown)
            assert (history.spans(1), history.kv_from(1)) == ([(5, 0)], [0])
            history = versions.history(new)
            assert (history.spans(1), history.kv_from(1)) == ([(5, 0)], [])
            # All compute theirs again, also after an update that failed.
            versions.keep_keys([])
            versions.clear_keys()
            versions.switch(6, {old: 20, unknown: 1, new: 4})
            history = versions.history(old)
            assert history.spans(30) == [(0, 0), (5, 10), (6, 20)]
            assert history.kv_from(30) == [0, 0, 6]
    with versions.request(4) as later:
        assert versions.history(later).kv_from(1) == []


def test_a_prompt_that_is_being_scored_begins_again_with_the_new_weights():
    versions, requests = Versions(), Requests()
    aborted: list[Any] = []

    async def abort(ids: list[str]) -> None:
        aborted.extend(ids)

    async def reset_encoder_cache() -> None:
        aborted.append("encoder")

    with (
        versions.request(1) as plain,
        versions.request(2, is_scoring=True) as unscored,
        # Its prompt is scored: it goes on.
        versions.request(3, is_scoring=True) as scored,
    ):
        for one, is_prefilling in ((plain, True), (unscored, True), (scored, False)):
            requests[one] = SimpleNamespace(external_req_id=one, is_prefilling=is_prefilling)
        engine = weights(versions, requests)
        vars(engine._llm).update(abort=abort, reset_encoder_cache=reset_encoder_cache)
        asyncio.run(engine.keep_keys())
        assert aborted == [unscored, "encoder"]
        # Of others an abort means that the engine ends.
        assert versions.restarting == {unscored}
    assert not versions.restarting


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
    assert found == {request_id: 5}
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
    assert found == {one: 4, other: 1}
    assert requests.num_looks == 3


def test_tokens_are_awaited_for_as_long_as_they_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.engine.weights.SETTLE_S", 0.0)
    versions, last = Versions(), 3 * MAX_SETTLES

    def come(num_looks: int) -> None:
        requests[name] = state(name, min(num_looks, last))

    requests = Requests(come)
    with versions.request(1) as name:
        found = asyncio.run(weights(versions, requests).progress())
    # Those that come after it would be reported as of the new weights.
    assert found == {name: last}


def test_a_request_that_is_never_known_is_awaited_for_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.engine.weights.SETTLE_S", 0.0)
    versions, requests = Versions(), Requests()
    with versions.request(1):
        assert asyncio.run(weights(versions, requests).progress()) == {}
    assert requests.num_looks == MAX_SETTLES + 1


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
