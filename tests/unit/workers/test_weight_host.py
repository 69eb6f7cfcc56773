"""An update through the host of one of vLLM's processes: checked, staged, loaded, forgotten."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from harness.stub_tensors import StubModel
from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import plan_chunks
from workers.in_model.checkpoint_files import Refused
from workers.in_model.host import Host, answer_of
from workers.in_model.load.copies import Copy
from workers.in_model.proof.catalogue import Catalogue
from workers.in_model.proof.coverage import Coverage, HalfLoaded
from workers.in_model.receiving import host_memory
from workers.in_model.receiving.arrivals import Arrivals, CannotLeave
from workers.in_model.receiving.staging import InKvCache

INFOS = [TensorInfo("first", "float32", [4]), TensorInfo("second", "float32", [2, 3])]
ENCODED = msgspec.msgpack.encode(INFOS)


class FakeReceiver:
    """A group in which tensors come when the test says so."""

    timeout_s = 10.0

    def __init__(self) -> None:
        self.staged: dict[str, torch.Tensor] = {}
        self.is_idle, self.is_closed, self.has_ended_ = True, False, True
        self.announced: list[Any] = []

    def announce(self, chunks: Any, staging: Any) -> None:
        self.announced.append(staging)
        self.is_idle = False

    def come(self, tensors: dict[str, torch.Tensor]) -> None:
        self.staged, self.is_idle = tensors, True

    def close(self) -> None:
        self.is_closed = True

    def drop(self) -> None:
        self.staged, self.is_idle = {}, True

    def has_ended(self, timeout_s: float) -> bool:
        return self.has_ended_


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {one.name: torch.full(one.shape, value) for one in INFOS}


class Hosted:
    """A host whose model has two parameters, with its parts at hand."""

    def __init__(self) -> None:
        self.module: Any = torch.nn.Module()
        for one in INFOS:
            self.module.register_parameter(one.name, torch.nn.Parameter(torch.zeros(one.shape)))
        self.host: Any = Host(StubModel(self.module))
        self.receiver = FakeReceiver()
        self.host._arrivals._receiver = self.receiver
        proof = self.host._proof
        proof.catalogue = Catalogue(INFOS)
        proof._dry_run = lambda *_, **__: Coverage({}, {}, set(), set(), set(), is_confirmed=True)
        # As if an update had been learned, as vLLM's reload is not here.
        copies = [
            Copy(getattr(self.module, one.name).data, one.name, tuple(one.shape), stride, 0)
            for one, stride in zip(INFOS, [(1,), (3, 1)], strict=True)
        ]
        self.host._loader._plan.add(copies, tensors(0.0))
        self.ended_offers: list[bool] = []
        self.host._exchange.end_offer = lambda: self.ended_offers.append(self.is_old)

    @property
    def is_old(self) -> bool:
        return not any(one.any() for one in self.module.parameters())

    def begin(self, setting: str = "beside") -> dict[str, Any]:
        report: dict[str, Any] = self.host.begin(ENCODED, False, 0, setting, "", "clear")
        return report


@pytest.fixture
def hosted() -> Hosted:
    return Hosted()


def test_what_has_come_is_loaded_and_readers_of_the_old_weights_end_first(hosted: Hosted):
    report = hosted.begin()
    assert report == {
        "missing": [], "ignored": [], "kept": [], "split_layers": "", "staging": "beside",
    }  # fmt: skip
    hosted.receiver.come(tensors(2.0))
    assert hosted.is_old
    assert hosted.host.apply() == {"loaded": 2}
    assert all(torch.equal(one, torch.full_like(one, 2)) for one in hosted.module.parameters())
    assert hosted.ended_offers == [True]
    assert not hosted.receiver.staged
    # What was checked is forgotten: nothing is loaded twice, or unchecked.
    assert answer_of("apply", hosted.host.apply)[0] == "error"


def test_a_folder_is_loaded_in_place_of_what_came(hosted: Hosted, tmp_path: Path):
    hosted.begin()
    hosted.host.drop(False)
    save_file(tensors(3.0), tmp_path / "model.safetensors")
    assert hosted.host.check_folder(str(tmp_path)) == {"ignored": [], "num_tensors": 2}
    loaded: list[Path] = []
    hosted.host._loader.load_folder = lambda folder: loaded.append(folder) or 2
    assert hosted.host.apply() == {"loaded": 2}
    assert loaded == [tmp_path]
    # The next update comes from the group again.
    hosted.begin()
    hosted.receiver.come(tensors(4.0))
    hosted.host.apply()
    assert hosted.module.first[0] == 4
    assert loaded == [tmp_path]


def test_a_dropped_update_leaves_the_model_and_a_group_that_still_sends(hosted: Hosted):
    hosted.begin()
    hosted.host.drop(False)
    assert (hosted.is_old, hosted.receiver.is_closed) == (True, True)
    assert hosted.ended_offers == []


def test_a_demanded_proof_makes_the_next_update_learn_anew(hosted: Hosted):
    for forgets_proofs in (False, True):
        hosted.begin()
        coverage = hosted.host._proof.coverage
        hosted.receiver.come(tensors(1.0))
        hosted.host.apply(forgets_proofs)
        assert coverage.is_confirmed != forgets_proofs
        assert hosted.host._loader._plan.fits_tensors(tensors(1.0)) != forgets_proofs


def test_a_list_that_is_sent_again_is_checked_once(hosted: Hosted):
    runs: list[int] = []
    hosted.host._proof._dry_run = lambda *_, **__: runs.append(1)
    for is_partial in (False, False, True, True, False):
        hosted.host.check(ENCODED, is_partial)
    assert len(runs) == 3


def with_kv_cache(receiver: FakeReceiver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Arrivals of which nothing fits beside the model."""
    model = StubModel(torch.nn.Module())
    monkeypatch.setattr(StubModel, "kv_caches", [torch.full((64,), 7.0)])
    arrivals: Any = Arrivals(model)
    arrivals._receiver = receiver
    return arrivals


def test_what_goes_into_the_kv_cache_comes_once_generation_stands(monkeypatch: pytest.MonkeyPatch):
    receiver = FakeReceiver()
    arrivals = with_kv_cache(receiver, monkeypatch)
    chunks = plan_chunks(INFOS, 0)
    assert arrivals.plan(chunks, "kv", 0, "", "clear", 0).name == "kv"
    assert receiver.announced == []
    arrivals.receive()
    arrivals.receive()
    (staging,) = receiver.announced
    assert isinstance(staging, InKvCache)
    # While NCCL may still write there, only a new process may generate.
    receiver.has_ended_ = False
    with pytest.raises(CannotLeave, match="a former group did not end"):
        arrivals.drop()
    assert receiver.is_closed


def test_memory_of_the_host_is_not_used_again_while_nccl_may_write_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_memory, "CLAIMS", tmp_path / "claims")
    receiver = FakeReceiver()
    arrivals: Any = Arrivals(StubModel(torch.nn.Module()))
    arrivals._receiver = receiver
    assert arrivals.plan(plan_chunks(INFOS, 0), "host", 0, "", "clear", 0).name == "host"
    receiver.has_ended_ = False
    with pytest.raises(CannotLeave, match="a former group did not end"):
        arrivals.drop()
    receiver.has_ended_ = True
    arrivals.drop()
    assert receiver.is_closed


def test_what_came_moves_out_of_the_kv_cache_where_there_is_room(monkeypatch: pytest.MonkeyPatch):
    receiver = FakeReceiver()
    arrivals = with_kv_cache(receiver, monkeypatch)
    arrivals.plan(plan_chunks(INFOS, 0), "kv", 0, "", "clear", 0)
    arrivals.receive()
    (staging,) = receiver.announced
    staging.names = ["first"]
    came = tensors(5.0)
    receiver.come(came)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=16))
    assert not arrivals.set_aside()
    assert receiver.staged is came
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=17))
    assert arrivals.set_aside()
    assert receiver.staged["first"] is not came["first"]
    assert torch.equal(receiver.staged["first"], came["first"])
    # A tensor that waits elsewhere stays there.
    assert receiver.staged["second"] is came["second"]


@pytest.mark.parametrize(
    "error, kind, text",
    [
        (Refused("no such tensor"), "refused", "no such tensor"),
        (CannotLeave("it hangs"), "broken", "it hangs"),
        (HalfLoaded("half"), "error", "half"),
        (ValueError("a fault"), "error", "ValueError: a fault"),
    ],
)
def test_errors_are_answers(error: Exception, kind: str, text: str):
    def fail() -> None:
        raise error

    assert answer_of("fail", fail) == [kind, text]
    assert answer_of("pass", lambda: None) == ["ok", None]
