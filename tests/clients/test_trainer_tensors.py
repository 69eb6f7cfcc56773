"""What a trainer passes to `WeightsClient.update`: its forms, its memory, sharded parameters."""

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.servers import REPOSITORY, environment
from tests.kit.trainers.sharded_trainer import CHUNK_BYTES, adapted_model, whole_model
from tests.kit.trainers.trainer_messages import CPU, Pairs, assert_same, sent
from titopool.client.weights import packing
from titopool.client.weights.packing import messages_of
from titopool.client.weights.sources import Source, join_update
from titopool.client.weights_client import WeightsClient, WeightsError
from titopool.wire.weight_plan import Checksum, checksum, message_of, plan_chunks, views_of


def pairs() -> Pairs:
    torch.manual_seed(0)
    return [
        ("a", torch.randn(6, 4)),
        ("b", torch.randn(4, 6).t()),
        ("c", torch.randn(3).to(torch.bfloat16)),
        ("d", torch.randn(())),
        ("e", torch.zeros(0, 2)),
        ("f", torch.randn(30, 5)[::2]),
    ]


# ---- forms ---------------------------------------------------------------------------

FORMS: dict[str, Callable[[Pairs], Any]] = {
    "list": list,
    "state-dict": dict,
    "items": lambda some: dict(some).items(),
    "function": lambda some: lambda: iter(some),
    "iterator": iter,
    "generator": lambda some: (pair for pair in some),
}


@pytest.mark.parametrize("chunk_bytes", [0, 1, 100, 10**6])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_sends_the_same_bytes(form: str, chunk_bytes: int):
    digest = Checksum()
    found = sent(Source(FORMS[form](pairs())), chunk_bytes, digest)
    assert_same(found, pairs())
    assert digest.digest() == checksum([tensor for _, tensor in pairs()])


def test_a_module_sends_its_parameters():
    model = torch.nn.BatchNorm1d(3)
    found = sent(Source(model), 100)
    assert_same(found, [(name, one.detach()) for name, one in model.named_parameters()])


def test_with_metadata_an_iterator_is_iterated_once():
    metadata = [("a", torch.float32, torch.Size([2])), ("b", "torch.bfloat16", [1])]
    tensors = [("a", torch.ones(2)), ("b", torch.ones(1, dtype=torch.bfloat16))]
    begun: list[str] = []

    def made() -> Iterator[tuple[str, Any]]:
        for pair in tensors:
            begun.append(pair[0])
            yield pair

    source = Source(made(), metadata)
    assert begun == []
    assert_same(sent(source, 0), tensors)
    assert begun == ["a", "b"]


# ---- memory --------------------------------------------------------------------------


class Alive:
    """Counts the bytes of tensors that are alive."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def watch(self, tensor: Any) -> Any:
        self._change(tensor.nbytes)
        weakref.finalize(tensor, self._change, -tensor.nbytes)
        return tensor

    def _change(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


class SendingGroup:
    """Stands in for `TrainerGroup`: a broadcast takes until somebody waits for it."""

    def broadcast(self, message: Any, check_workers: Any) -> Callable[[], None]:
        return lambda: None

    def abort(self) -> None:
        pass


@pytest.mark.parametrize("chunk_bytes", [0, 3999, 4000, 10_000])
def test_a_client_holds_two_chunks_and_one_tensor(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """Of 40 tensors that a function makes when they are asked for."""
    # Else small tensors may wait until they are copied together.
    monkeypatch.setattr(packing, "MAX_WAITING_BYTES", 0)
    messages, tensors = Alive(), Alive()
    monkeypatch.setattr(packing, "message_of", lambda *a: messages.watch(message_of(*a)))
    peaks = [0, 0]

    def made() -> Iterator[tuple[str, Any]]:
        for index in range(40):
            # Besides the chunk that this tensor is for.
            peaks[0] = max(peaks[0], messages.num_bytes)
            yield f"t{index}", tensors.watch(torch.zeros(250))
            peaks[1] = max(peaks[1], tensors.num_bytes)

    client = WeightsClient("http://127.0.0.1:1", device="cpu", chunk_bytes=chunk_bytes)
    client._group = SendingGroup()  # type: ignore[assignment]
    answer = {"update": "u", "missing": [], "ignored": [], "kept": [], "version": 1}
    client.call = lambda *a, **o: answer  # type: ignore[method-assign]
    assert client.update(made, policy="keep", with_checksum=True)["version"] == 1
    largest = max(chunk.num_bytes for chunk in plan_chunks(Source(made).infos, chunk_bytes))
    assert peaks == [largest, 1000]


# ---- wrong tensors -------------------------------------------------------------------


def fails() -> Iterator[tuple[str, Any]]:
    yield "a", torch.zeros(2)
    raise OSError("staged")


WRONG: dict[str, tuple[Any, str]] = {
    "raises": (fails, "OSError: staged"),
    "generator-raises": (fails(), "OSError: staged"),
    "nothing": (None, "not iterable"),
    "number": (3, "not iterable"),
    "tensors-only": ([torch.zeros(2)], "pairs of a name and a tensor, got Tensor"),
    "names-only": (["a"], "pairs of a name and a tensor, got str"),
    "no-name": ([(1, torch.zeros(2))], "got int, Tensor"),
    "no-tensor": ([("a", [1.0])], "got str, list"),
    "three": ([("a", torch.zeros(2), 3)], "got str, Tensor, int"),
    "dtype": ([("a", torch.zeros(2, dtype=torch.complex64))], "a: expected a dtype of .*complex64"),
    "meta": ([("a", torch.zeros(2, device="meta"))], "a: expected values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named_before_anything_is_sent(name: str):
    tensors, text = WRONG[name]
    with pytest.raises(WeightsError, match=text):
        Source(tensors)


@pytest.mark.parametrize(
    "metadata", [3, [("a", "float32")], [("a", "float32", ["x"])], [("a", "f4", [1])]]
)
def test_wrong_metadata_are_refused(metadata: Any):
    with pytest.raises(WeightsError, match="expected"):
        Source(pairs, metadata)


CHANGED: dict[str, tuple[Pairs, str]] = {
    "name": ([("x", torch.zeros(2)), ("b", torch.zeros(2))], r"expected a of .*got x"),
    "shape": ([("a", torch.zeros(3)), ("b", torch.zeros(2))], r"shape \[2\], got .*shape \[3\]"),
    "dtype": ([("a", torch.zeros(2).half()), ("b", torch.zeros(2))], "float32 .*got .*float16"),
    "fewer": ([("a", torch.zeros(2))], "expected b .*got no more"),
    "more": ([("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(2))], "end .*got c"),
}  # fmt: skip


@pytest.mark.parametrize("chunk_bytes", [0, 100])
@pytest.mark.parametrize("name", CHANGED)
def test_a_second_pass_must_give_the_announced_tensors(name: str, chunk_bytes: int):
    tensors, text = CHANGED[name]
    metadata = [("a", torch.float32, [2]), ("b", torch.float32, [2])]
    source = Source(tensors, metadata)
    with pytest.raises(WeightsError, match=text):
        list(messages_of(source, chunk_bytes, CPU, None))


# ---- sharded parameters --------------------------------------------------------------


# Two ranks as forks of a process that has imported torch and PEFT once.
RANKS = """if True:
    import multiprocessing, sys
    from tests.kit.trainers import sharded_trainer

    def run(rank):
        sys.argv[1:] = [str(rank), "2", folder]
        sharded_trainer.main()

    folder = sys.argv[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(str([one.exitcode for one in ranks]) if any(one.exitcode for one in ranks) else 0)
"""


def test_parameters_of_fsdp2_are_gathered_one_at_a_time(tmp_path: Path):
    """Two processes; the other one keeps in step, also when nothing can be sent."""
    ran = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path)],
        env=environment(), cwd=REPOSITORY, timeout=240, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(2))
    assert_packed(tmp_path / "messages.pt", whole_model())
    assert_packed(tmp_path / "adapted.pt", adapted_model().merge_and_unload())


def assert_packed(file: Path, model: Any) -> None:
    """Checks that a rank packed the parameters of the whole model."""
    messages, digest = torch.load(file)
    expected = [(name, one.detach()) for name, one in model.named_parameters()]
    chunks = plan_chunks(Source(expected).infos, CHUNK_BYTES)
    assert len(chunks) > 1
    found = [
        view
        for chunk, message in zip(chunks, messages, strict=True)
        for view in views_of(message, chunk)
    ]
    assert all(torch.equal(one, two) for one, (_, two) in zip(found, expected, strict=True))
    assert digest == checksum(found)


class FakeZero:
    """Stands in for `deepspeed.zero`, as DeepSpeed is not installed here.

    As with ZeRO-3, a parameter is empty outside of `GatheredParameters`, and its values are freed at
    the end: the fake overwrites them, so that a late use would show.
    """

    def __init__(self) -> None:
        self.whole: dict[int, Any] = {}
        self.gathered: list[int] = []
        self.num_open = 0
        self.fails = False

    def partition(self, tensor: Any) -> Any:
        parameter = torch.nn.Parameter(torch.empty(0, dtype=tensor.dtype))
        parameter.ds_id = len(self.whole)  # type: ignore[attr-defined]
        parameter.ds_shape = tensor.shape  # type: ignore[attr-defined]
        self.whole[len(self.whole)] = tensor
        return parameter

    @contextmanager
    def GatheredParameters(self, parameters: list[Any]) -> Iterator[None]:
        if self.fails:
            raise RuntimeError("staged")
        (parameter,) = parameters
        self.num_open += 1
        assert self.num_open == 1
        self.gathered.append(parameter.ds_id)
        parameter.data = self.whole[parameter.ds_id].clone()
        yield
        parameter.data.fill_(77)
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        self.num_open -= 1


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> FakeZero:
    fake = FakeZero()
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=fake))
    return fake


@pytest.mark.parametrize("chunk_bytes", [0, 100, 10**6])
def test_parameters_of_zero3_are_gathered_one_at_a_time(zero: FakeZero, chunk_bytes: int):
    expected = pairs()
    tensors = [(name, zero.partition(tensor)) for name, tensor in expected]
    source = Source(iter(tensors))
    assert zero.gathered == []
    assert_same(sent(source, chunk_bytes), expected)
    assert zero.gathered == list(range(len(expected)))
    zero.gathered.clear()
    join_update(tensors)
    assert zero.gathered == list(range(len(expected)))


def test_after_a_failure_the_rest_is_gathered(zero: FakeZero):
    tensors = [(name, zero.partition(tensor)) for name, tensor in pairs()]
    source = Source(tensors)
    next(messages_of(source, 1, CPU, None))
    assert zero.gathered == [0]
    source.gather_rest()
    assert zero.gathered == list(range(len(tensors)))


def test_a_failed_gathering_names_the_tensor_and_ends_the_update(zero: FakeZero):
    tensors = [(name, zero.partition(tensor)) for name, tensor in pairs()]
    source = Source(tensors)
    zero.fails = True
    with pytest.raises(WeightsError, match=r"a: expected to gather .*RuntimeError: staged"):
        next(messages_of(source, 1, CPU, None))
    zero.fails = False
    # The other processes are no longer in step, so gathering more would hang.
    source.gather_rest()
    assert zero.gathered == []
