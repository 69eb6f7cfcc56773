"""A change of the messages between processes comes with another version of them."""

import hashlib
import json
from typing import Any

import msgspec
import pytest

from titopool.settings.sampling import SamplingOptions
from titopool.wire import messages
from titopool.wire.messages import ChatParsing, Chunk, FromWorker, Hello, ToWorker

# Of what messages consist of, by version. A new version gets a new line; the last line changes only
# before a release has it.
DIGESTS = {1: "ae8393eee1f7c599"}


def schema() -> dict[str, Any]:
    """All messages, with fields and types; of structs that travel as arrays, in their order."""
    # The last two travel as bytes in a job.
    _, components = msgspec.json.schema_components(
        [ToWorker, FromWorker, Chunk, ChatParsing, SamplingOptions]
    )
    return {name: without_texts(one) for name, one in components.items()}


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


def test_another_version_is_told_from_what_is_no_greeting():
    packed = msgspec.msgpack.decode(messages.encode(Hello()))
    for wire in (0, messages.WIRE_VERSION + 1):
        frame = messages.encode({**packed, "wire": wire})
        with pytest.raises(messages.UNREADABLE):
            messages.decode_to_worker(frame)
        assert f"have version {wire}, this process's" in messages.other_wire(frame)
    broken = [b"", b"\xc1", messages.encode({**packed, "wire": "2"}), messages.encode(Hello())]
    broken.append(messages.encode({**packed, "front_end": 1}))
    assert not any(messages.other_wire(frame) for frame in broken)
