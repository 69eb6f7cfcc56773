"""Parts of weight updates that need no engine: names and layers, chunks, versions, groups."""

import random
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from titopool.client.weights.trainer_group import within
from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import CHECKSUM_WORDS, checksum, message_of, plan_chunks, views_of
from workers.engine.versions import Versions
from workers.in_model.catalogue import Catalogue
from workers.in_model.checkpoint_files import Refused, folder_tensors, read_header

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def info(name: str, *shape: int, dtype: str = "bfloat16") -> TensorInfo:
    return TensorInfo(name, dtype, list(shape))


TENSORS = [
    info("model.embed.weight", 10, 4),
    info("model.0.attn.q_proj.weight", 8, 4),
    info("model.0.attn.k_proj.weight", 2, 4),
    info("model.0.attn.v_proj.weight", 2, 4),
    info("model.0.attn.o_proj.weight", 4, 8),
    info("model.0.attn.o_proj.bias", 4),
    info("model.1.experts.0.up.weight", 4, 4),
    info("model.1.experts.1.up.weight", 4, 4),
    info("lm_head.weight", 10, 4),
]


def catalogue(**options: object) -> Catalogue:
    return Catalogue(TENSORS, packed=PACKED, **options)  # type: ignore[arg-type]


def test_all_tensors_fit():
    fit = catalogue().fit(TENSORS, is_partial=False)
    assert (fit.missing, fit.ignored, fit.split_layers, fit.splits) == ([], [], [], {})


def test_a_tied_head_is_optional():
    tied = catalogue(is_tied=True)
    assert tied.fit(TENSORS[:-1], is_partial=False).ignored == []
    assert tied.fit(TENSORS, is_partial=False).ignored == ["lm_head.weight"]
    with pytest.raises(Refused, match="lm_head"):
        catalogue().fit(TENSORS[:-1], is_partial=False)


@pytest.mark.parametrize(
    "sent, rest",
    [
        (["model.0.attn.q_proj.weight"], ["model.0.attn.k_proj.weight", "model.0.attn.v_proj.weight"]),
        (["model.0.attn.o_proj.weight"], ["model.0.attn.o_proj.bias"]),
        (["model.1.experts.1.up.weight"], ["model.1.experts.0.up.weight"]),
        (["model.embed.weight", "lm_head.weight"], []),
    ],
    ids=["qkv", "bias", "experts", "whole"],
)  # fmt: skip
def test_tensors_missing_from_a_layer_are_found(sent: list[str], rest: list[str]):
    tensors = [one for one in TENSORS if one.name in sent]
    assert catalogue().fit(tensors, is_partial=True).split_layers == rest


def test_a_fused_tensor_is_split_by_rows():
    fused = info("model.0.attn.qkv_proj.weight", 12, 4)
    fit = catalogue().fit([fused], is_partial=True)
    assert fit.splits[fused.name] == [
        ("model.0.attn.q_proj.weight", 8),
        ("model.0.attn.k_proj.weight", 2),
        ("model.0.attn.v_proj.weight", 2),
    ]
    assert fit.split_layers == []
    with pytest.raises(Refused, match=r"expected shape \[12, 4\], got \[11, 4\]"):
        catalogue().fit([info(fused.name, 11, 4)], is_partial=True)


def test_the_largest_layer_counts_all_its_tensors():
    # q, k and v: 12 rows of 4 numbers with two bytes each; the embedding and the head: 10 rows.
    assert catalogue().largest_layer_bytes == 12 * 4 * 2


def test_checkpoint_names_are_renamed_to_the_model_s():
    renamed = catalogue(rename=lambda name: name.removeprefix("base."))
    tensors = [info("base." + one.name, *one.shape) for one in TENSORS]
    assert renamed.fit(tensors, is_partial=False).missing == []


def test_only_float_dtypes_are_accepted():
    catalogue().fit([info("model.embed.weight", 10, 4, dtype="float32")], is_partial=True)
    for dtype in ("int8", "float8_e4m3fn", "complex64"):
        with pytest.raises(Refused, match="dtype"):
            catalogue().fit([info("model.embed.weight", 10, 4, dtype=dtype)], is_partial=True)


def test_a_broken_file_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match="got none"):
        folder_tensors(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 2)}, file)
    assert folder_tensors(tmp_path) == [info("a", 3, 2, dtype="float32")]
    whole = file.read_bytes()
    for content in (
        whole[:-1],
        whole[:20],
        b"",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 2) + b"[]",
        whole.replace(b"F32", b"F99"),
    ):
        file.write_bytes(content)
        with pytest.raises(Refused, match=r"model\.safetensors"):
            read_header(file)


# ---- chunks --------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 2, 8])
@pytest.mark.parametrize("seed", range(10))
def test_a_chunk_s_views_are_its_tensors_at_any_offset(seed: int, offset: int):
    """Mixed dtypes, empty tensors, and buffers that begin anywhere in a larger memory."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float32, torch.int8, torch.float64]
    tensors = [
        (torch.randn(chance.randrange(0, 40), chance.randrange(1, 9)) * 50).to(
            chance.choice(dtypes)
        )
        for _ in range(chance.randrange(1, 30))
    ]
    infos = [
        info(str(index), *one.shape, dtype=str(one.dtype).removeprefix("torch."))
        for index, one in enumerate(tensors)
    ]
    limit = chance.choice([1, 300, 2_000, 10**6])
    found: list[Any] = []
    rest = iter(tensors)
    for chunk in plan_chunks(infos, limit):
        parts = [next(rest).contiguous().view(-1).view(torch.uint8) for _ in chunk.pieces]
        buffer = torch.cat([torch.zeros(offset, dtype=torch.uint8), *parts])[offset:]
        assert len(buffer) == chunk.num_bytes
        begins_in_memory = buffer.untyped_storage().data_ptr()
        views = views_of(buffer, chunk)
        if offset % 8 == 0:
            copies = [one for one in views if one.untyped_storage().data_ptr() != begins_in_memory]
            assert sum(one.nbytes for one in copies) == chunk.num_copied_bytes
        found += views
    assert all(torch.equal(one, two) for one, two in zip(tensors, found, strict=True))
    assert checksum(found) == checksum(tensors)


def test_without_packing_each_tensor_has_a_broadcast_in_its_dtype():
    infos = [info("a", 3), info("b", 0, 4), info("c", 2, 2, dtype="float32"), info("d")]
    chunks = plan_chunks(infos, 0)
    assert [(one.dtype, one.num_bytes) for one in chunks] == [
        ("bfloat16", 6), ("bfloat16", 0), ("float32", 16), ("bfloat16", 2),
    ]  # fmt: skip
    message = message_of(torch.zeros(16, dtype=torch.uint8), chunks[2])
    assert (message.dtype, message.shape) == (torch.float32, (4,))
    assert {chunk.dtype for chunk in plan_chunks(infos, 1)} == {"uint8"}


def test_a_checksum_does_not_depend_on_where_memory_begins():
    """Also beyond the number of words that are summed at once."""
    whole = torch.arange(4 * CHECKSUM_WORDS + 103, dtype=torch.int32).to(torch.uint8)
    for begin in range(4):
        assert checksum([whole[begin:]]) == checksum([whole[begin:].clone()])


def test_a_checksum_detects_a_changed_bit_order_or_tensor():
    one, two = torch.arange(1000, dtype=torch.float32), torch.ones(7, dtype=torch.bfloat16)
    changed = one.clone()
    changed.view(torch.int32)[500] ^= 1
    moved = one.clone()
    moved[3], moved[4] = one[4], one[3]
    sums = [
        checksum(tensors)
        for tensors in ([one, two], [changed, two], [two, one], [one], [moved, two])
    ]
    assert len(set(sums)) == len(sums)


# ---- versions ------------------------------------------------------------------------


def test_a_request_across_two_updates_has_three_spans():
    versions = Versions()
    with versions.request(1) as request_id:
        versions.switch(5, {request_id: {0: 10, 1: 0}})
        versions.switch(6, {request_id: {0: 25, 1: 3}})
    history = versions.take(request_id)
    assert history.spans(0, 40) == [(0, 0), (5, 10), (6, 25)]
    # Sequence 1 had no token yet at the first update.
    assert history.spans(1, 40) == [(5, 0), (6, 3)]


def test_an_ended_sequence_keeps_its_version():
    versions = Versions()
    with versions.request(1) as request_id:
        # Of two sequences, only the second is still running.
        versions.switch(5, {request_id: {1: 4}})
    history = versions.take(request_id)
    assert history.spans(0, 9) == [(0, 0)]
    assert history.spans(1, 9) == [(0, 0), (5, 4)]
    assert history.spans(1, 4) == [(0, 0)]


def test_requests_after_an_update_have_its_version_and_leave_no_history():
    versions = Versions()
    versions.switch(3, {})
    with versions.request(1) as request_id, versions.request(1) as other:
        assert request_id != other
        versions.switch(4, {other: {0: 1}})
    assert versions.take(request_id).spans(0, 2) == [(4, 0)]
    assert versions.take(request_id).spans(0, 0) == [(4, 0)]

    def leave() -> None:
        with versions.request(2) as failing:
            versions.switch(5, {failing: {0: 1}})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        leave()
    versions.take(other)
    assert not versions.open
    assert not versions._histories


def test_a_request_that_ends_while_weights_are_loaded_leaves_no_history():
    versions = Versions()
    with versions.request(1) as ended, versions.request(2) as open_still:
        progress = {ended: {0: 3}, open_still: {0: 4}}
        versions.open.discard(ended)
        assert versions.take(ended).spans(0, 3) == [(0, 0)]
        versions.switch(1, progress)
    assert versions.take(open_still).spans(0, 6) == [(0, 0), (1, 4)]
    assert not versions._histories


def test_a_call_that_cannot_be_aborted_is_abandoned():
    assert within(5, "nothing", lambda: 3, lambda: False) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, "nothing", lambda: 1 // 0, lambda: False)
    for timeout_s, should_stop in ((0.05, False), (60.0, True)):
        may_end, is_aborted = threading.Event(), threading.Event()

        def make(may_end: Any = may_end, is_aborted: Any = is_aborted) -> Any:
            may_end.wait(60)
            return SimpleNamespace(abort=is_aborted.set)

        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=f"no group within {timeout_s:g} s"):
            within(timeout_s, "no group", make, lambda should_stop=should_stop: should_stop)
        assert time.monotonic() - begin < 30
        # A late result is discarded.
        may_end.set()
        assert is_aborted.wait(10)
