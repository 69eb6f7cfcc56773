"""A change of the messages between processes comes with another version of them."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from titopool.answers.weights import Committed, WorkerWeights
from titopool.settings.sampling import SamplingOptions
from titopool.wire import messages
from titopool.wire.messages import ChatParsing, Chunk, FromWorker, Hello, Logprobs, ToWorker
from workers.in_model.peers.model_bytes import Plan
from workers.in_model.peers.offer import Question

# Chat parsing and sampling options travel as bytes in a job, the next two between workers. Of the last
# two, the results of commands have the fields.
ROOTS = [
    ToWorker, FromWorker, Chunk, ChatParsing, SamplingOptions, Question, Plan, Committed, WorkerWeights,
]  # fmt: skip
# Of what messages consist of, by version. A new version gets a new line; the last line changes only
# before a release has it.
DIGESTS = {1: "0e294edee0a167ae", 2: "8e58af75c84af827"}


def schema(roots: Sequence[Any] = ROOTS) -> dict[str, Any]:
    """All messages, with fields and types. A schema of a struct that travels as an array has no names."""
    _, components = msgspec.json.schema_components(roots)
    found = {name: without_texts(one) for name, one in components.items()}
    return found | {f"fields of {one.__name__}": fields_of(one) for one in structs_in(roots)}


def fields_of(struct: type[msgspec.Struct]) -> list[str]:
    return [name for name in struct.__struct_encode_fields__ if name != "wire"]


def structs_in(roots: Sequence[Any]) -> set[type[msgspec.Struct]]:
    found, left = set(), [*inspect.multi_type_info(roots)]
    while left:
        match left.pop():
            case inspect.StructType(cls=struct, fields=fields):
                if struct not in found:
                    found.add(struct)
                    left += [one.type for one in fields]
            case inspect.Type() as one:
                left += [getattr(one, name) for name in one.__struct_fields__]
            case tuple() as several:
                left += several
    return found


def without_texts(value: Any) -> Any:
    """Without docstrings, and without the version itself."""
    if isinstance(value, dict):
        return {
            key: without_texts(one)
            for key, one in value.items()
            if key != "wire" and not (key == "description" and isinstance(one, str))
        }
    return [without_texts(one) for one in value] if isinstance(value, list) else value


def digest_of(found: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def test_each_version_has_its_own_messages():
    found = digest_of(schema())
    assert DIGESTS.get(messages.WIRE_VERSION) == found, (
        "messages have changed: raise WIRE_VERSION in titopool/wire/messages.py, and give the new "
        f"version its line in DIGESTS: {found}"
    )
    assert len(set(DIGESTS.values())) == len(DIGESTS)
    assert max(DIGESTS) == messages.WIRE_VERSION


@pytest.mark.parametrize("change", ["a field", "a type", "a default", "an order"])
def test_a_change_of_a_message_changes_the_digest(change: str):
    found = schema()
    fields = found["Hello"]["properties"]
    if change == "a field":
        fields["later"] = {"type": "integer"}
    elif change == "a type":
        fields["wants_engine_metrics"]["type"] = "integer"
    elif change == "a default":
        fields["wants_engine_metrics"]["default"] = True
    else:
        found["Completion"]["prefixItems"].reverse()
    assert digest_of(found) != digest_of(schema())


def test_two_fields_of_one_type_that_change_places_change_the_digest():
    """In an array they are told apart by their places only."""
    names = list(Logprobs.__struct_fields__)
    names[2:4] = reversed(names[2:4])
    swapped = msgspec.defstruct("Logprobs", [(name, bytes, b"") for name in names], array_like=True)
    plain = msgspec.defstruct(
        "Logprobs", [(name, bytes, b"") for name in Logprobs.__struct_fields__], array_like=True
    )
    assert digest_of(schema([swapped])) != digest_of(schema([plain]))


def test_another_version_is_told_from_what_is_no_greeting():
    packed = msgspec.msgpack.decode(messages.encode(Hello()))
    for wire in (0, messages.WIRE_VERSION + 1):
        frame = messages.encode({**packed, "wire": wire})
        with pytest.raises(messages.UNREADABLE):
            messages.decode_to_worker(frame)
        assert f"have version {wire}, this process's" in messages.explain_other_wire(frame)
    # A release without versions, whose heartbeats this one cannot read.
    old = messages.encode({"type": "heartbeat", "worker_id": "one", "loaded_at": 1.0})
    assert "have version 0, this process's" in messages.explain_other_wire(old)
    broken = [b"", b"\xc1", messages.encode({**packed, "wire": "2"}), messages.encode(Hello())]
    broken.append(messages.encode({**packed, "front_end": 1}))
    assert not any(messages.explain_other_wire(frame) for frame in broken)
