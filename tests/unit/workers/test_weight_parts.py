"""Parts of weight updates that need no engine: names and layers, chunks, versions, groups."""

import json
import math
import random
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from harness.stub_tensors import StubModel
from titopool.client.weights.trainer_group import within
from titopool.wire.commands import TensorInfo
from titopool.wire.messages import Job
from titopool.wire.weight_plan import CHECKSUM_WORDS, checksum, message_of, plan_chunks, views_of
from workers.engine.versions import Versions
from workers.in_model.checkpoint_files import Refused, folder_tensors, read_header
from workers.in_model.host import Host, answer_of
from workers.in_model.proof.catalogue import Catalogue, _embedding_of_head
from workers.in_model.proof.proof import Proof

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
    tied = catalogue(embedding="model.embed.weight")
    assert tied.fit(TENSORS[:-1], is_partial=False).ignored == []
    assert tied.fit(TENSORS, is_partial=False).ignored == ["lm_head.weight"]
    with pytest.raises(Refused, match="lm_head"):
        catalogue().fit(TENSORS[:-1], is_partial=False)


EMBEDDING, HEAD = "model.embed.weight", "lm_head.weight"


def with_tied_head(proof: Any) -> Any:
    """`proof` of a model whose head is its embedding, whatever the model is."""
    proof.catalogue = catalogue(embedding=EMBEDDING)
    proof._dry_run = lambda *_, **__: None
    return proof


def with_head(head: torch.Tensor) -> dict[str, torch.Tensor]:
    sent = {one.name: torch.arange(math.prod(one.shape)).view(one.shape) for one in TENSORS}
    return {name: one.bfloat16() for name, one in sent.items()} | {HEAD: head}


def rank_of(embedding: torch.Tensor, first: int, last: int) -> torch.nn.Module:
    """A model that holds some rows of the embedding, and rows that pad it."""
    layer = torch.nn.Embedding.from_pretrained(torch.cat([embedding[first:last], embedding[:2]]))
    layer.shard_indices = SimpleNamespace(  # type: ignore[assignment]
        org_vocab_start_index=first, org_vocab_end_index=last, num_org_elements=last - first
    )
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"embed": layer})})


SAME = with_head(torch.empty(0))[EMBEDDING]
OTHER = SAME.clone()
OTHER[9, 3] = 38.75
NAN = SAME.clone()
NAN[0, 0] = torch.nan


@pytest.mark.parametrize(
    "sent, refused",
    [
        (with_head(SAME), ""),
        (with_head(SAME.float()), ""),
        (with_head(NAN) | {EMBEDDING: NAN.clone()}, ""),
        (with_head(OTHER), "got values other than those of model.embed.weight; leave the head"),
        (with_head(SAME.float() + 1e-4), "got values other"),
        (
            with_head(SAME[:9]),
            f"got the shape (9, {SAME.shape[1]}), where model.embed.weight has {tuple(SAME.shape)}",
        ),
        ({HEAD: SAME}, ""),
        ({HEAD: SAME.float() + 1e-6}, ""),
        ({HEAD: OTHER}, "got no embedding with it, and other values than the served one's; leave"),
        ({HEAD: SAME[:5]}, "got no embedding with it, and other values"),
    ],
    ids=[
        "same",
        "wider",
        "nan",
        "other",
        "wider-other",
        "rows",
        "alone",
        "alone-wider",
        "alone-other",
        "alone-rows",
    ],
)
def test_a_tied_head_has_the_embedding_s_values(
    sent: dict[str, torch.Tensor], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("titopool.wire.weight_plan.COMPARED_ROWS", 4)
    proof = with_tied_head(Proof(StubModel(rank_of(SAME, first=2, last=10))))
    answers = [answer_of("heads", lambda: proof.compare_heads(sent))]
    if EMBEDDING in sent:
        names = list(sent)
        for index, some in enumerate((names[:5], names[5:])):
            save_file({one: sent[one] for one in some}, tmp_path / f"{index}.safetensors")
        answers.append(answer_of("folder", lambda: proof.check_folder(tmp_path)))
    for status, answer in answers:
        assert status == ("refused" if refused else "ok"), answer
        assert not refused or "lm_head.weight: expected the embedding's values" in answer
        assert refused in str(answer)


def test_a_tied_head_does_not_go_in_place():
    """In place nothing is kept that could be compared."""
    host: Any = Host(StubModel(torch.nn.Module()))
    with_tied_head(host._proof)
    asked = []

    def choose(chunks: Any, extra: int, not_in_place: str, *_: Any) -> Any:
        asked.append(not_in_place)
        return SimpleNamespace(name="in_place")

    host._arrivals._room = SimpleNamespace(choose=choose)
    host._arrivals._receiver = SimpleNamespace(announce=lambda *_: None)
    for sent in (TENSORS, TENSORS[:-1]):
        host._plan(sent, 0, "in_place", "", "clear", 0)
    assert asked == ["lm_head.weight, which must equal the embedding and may be left out,", ""]


@pytest.mark.parametrize(
    "names, config, expected",
    [
        (["model.embed_tokens", "lm_head"], {}, "model.embed_tokens.weight"),
        (["model.embed_tokens.base_layer", "lm_head"], {}, "model.embed_tokens.weight"),
        (["model.embed_tokens"], {"tie_word_embeddings": True}, "model.embed_tokens.weight"),
        (["model.per_layer", "model.wte"], {"tie_word_embeddings": True}, "model.wte.weight"),
        ([], {"tie_word_embeddings": True}, "embed_tokens.weight"),
        (["model.embed_tokens"], {}, ""),
    ],
)
def test_the_embedding_that_a_head_shares_is_found(
    names: list[str], config: dict[str, Any], expected: str
):
    shared, modules = torch.nn.Parameter(torch.ones(4, 8)), {}
    for name in names:
        width = 2 if name.endswith("per_layer") else 8
        modules[name] = SimpleNamespace(org_vocab_size=4, embedding_dim=width)
    model = SimpleNamespace(
        named_parameters=lambda remove_duplicate: [(f"{one}.weight", shared) for one in names],
        named_modules=modules.items,
    )
    text = SimpleNamespace(hidden_size=8, **config)
    assert _embedding_of_head(model, SimpleNamespace(hf_text_config=text)) == expected
    found = catalogue(embedding="transformer.wte.weight").tied_heads(["wte.weight", HEAD])
    assert found == {HEAD: "wte.weight"}


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


def test_a_folder_with_two_checkpoints_is_refused(tmp_path: Path):
    """Shards with their index of one save, and the single file of another one."""
    shard = tmp_path / "model-00001-of-00001.safetensors"
    save_file({"a": torch.ones(3, 2)}, shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard.name}}))
    assert folder_tensors(tmp_path) == [info("a", 3, 2, dtype="float32")]
    single = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.ones(1)}, single)
    with pytest.raises(Refused, match=r"expected one checkpoint in .*, got two: .* the older"):
        folder_tensors(tmp_path)
    # The index of a save in one file names that file.
    index.write_text(json.dumps({"weight_map": {"a": single.name, "b": single.name}}))
    assert len(folder_tensors(tmp_path)) == 2


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
        versions.switch(5, {request_id: 10})
        versions.switch(6, {request_id: 25})
    history = versions.take(request_id)
    assert history.spans(40) == [(0, 0), (5, 10), (6, 25)]
    assert history.spans(25) == [(0, 0), (5, 10)]


def test_a_request_without_a_token_at_an_update_has_the_next_version_only():
    versions = Versions()
    with versions.request(1) as request_id:
        versions.switch(5, {request_id: 0})
    assert versions.take(request_id).spans(9) == [(5, 0)]


def job_named(client_id: str) -> Job:
    return Job(1, 1, b"", 1, 1, msgspec.Raw(), client_id=client_id)


def test_jobs_are_stopped_by_their_clients_id():
    versions, stopped = Versions(), list[str]()
    with (
        versions.job(job_named("one"), lambda: stopped.append("one")),
        versions.job(job_named(""), lambda: stopped.append("")),
    ):
        assert versions.stop_jobs(["one", ""]) == 1
        assert stopped == ["one"]
        assert versions.stop_jobs(None) == versions.num_jobs == 2
    assert versions.num_jobs == 0


def test_requests_after_an_update_have_its_version_and_leave_no_history():
    versions = Versions()
    versions.switch(3, {})
    with versions.request(1) as request_id, versions.request(1) as other:
        assert request_id != other
        versions.switch(4, {other: 1})
    assert versions.take(request_id).spans(2) == [(4, 0)]
    assert versions.take(request_id).spans(0) == [(4, 0)]

    def leave() -> None:
        with versions.request(2) as failing:
            versions.switch(5, {failing: 1})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        leave()
    versions.take(other)
    assert not versions.open
    assert not versions._histories


def test_a_request_that_ends_while_weights_are_loaded_leaves_no_history():
    versions = Versions()
    with versions.request(1) as ended, versions.request(2) as open_still:
        progress = {ended: 3, open_still: 4}
        versions.open.discard(ended)
        assert versions.take(ended).spans(3) == [(0, 0)]
        versions.switch(1, progress)
    assert versions.take(open_still).spans(6) == [(0, 0), (1, 4)]
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
