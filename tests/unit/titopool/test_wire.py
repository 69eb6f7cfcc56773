"""Messages, keys, and log-probabilities on their way from vLLM to JSON."""

import os
import random
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import orjson
import pytest
import zmq
from msgspec import inspect

from app.outputs.token_arrays import json_reply, nested
from app.pool.discovery import is_named, look_up
from titopool.errors import ConfigError
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire import commands, messages
from titopool.wire.messages import Completed, Completion, Job, Logprobs
from titopool.wire.sockets import (
    MAX_IPC_PATH_BYTES,
    bind_router,
    connect_dealer,
    fault_of_listening,
    read_curve_key,
    worker_endpoint,
)
from workers.engine.outputs.packing import pack_logprobs


@dataclass
class Flat:
    """The fields of vLLM's FlatLogprobs that titopool reads."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def add(self, *entries: tuple[int, float, int]) -> None:
        self.start_indices.append(len(self.token_ids))
        for token_id, logprob, rank in entries:
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
        self.end_indices.append(len(self.token_ids))


def int32(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def unpacked(
    packed: Logprobs, completion_ids: bytes = b""
) -> tuple[list[list[float]], list[list[int]]]:
    values = nested(np.frombuffer(packed.values, np.float32), packed.counts)
    ids = nested(np.frombuffer(packed.token_ids or completion_ids, np.int32), packed.counts)
    return [list(map(float, one)) for one in values], [list(map(int, one)) for one in ids]


def test_the_sampled_token_is_sorted_in_and_appears_once():
    flat = Flat()
    flat.add((7, -0.5, 2), (3, -0.25, 1), (7, -0.5, 2))
    flat.add((9, -4.0, 40), (3, -0.5, 1), (2, -1.0, 2))
    packed = pack_logprobs(flat, int32(7, 9))
    assert packed.ranks == int32(2, 40)
    values, ids = unpacked(packed)
    assert ids == [[3, 7], [3, 2, 9]]
    assert values == [[-0.25, -0.5], [-0.5, -1.0, -4.0]]


@pytest.mark.parametrize(
    "sent, ids", [((7, 8), b""), ((7, 9), int32(7, 8))], ids=["sampled", "chosen"]
)
def test_one_entry_per_token_needs_no_counts_and_sampled_tokens_no_ids(sent, ids):
    flat = Flat()
    flat.add((7, -0.5, 1))
    flat.add((8, float("nan"), 1))
    packed = pack_logprobs(flat, int32(*sent))
    assert (packed.token_ids, packed.counts, packed.ranks) == (ids, b"", int32(1, 1))
    assert unpacked(packed, int32(*sent))[1] == [[7], [8]]


def test_a_sampled_token_that_is_always_the_top_one_needs_no_ids():
    flat = Flat()
    flat.add((7, -0.5, 1), (7, -0.5, 1))
    flat.add((8, -0.25, 1), (8, -0.25, 1))
    values = np.float32([-0.5, -0.25]).tobytes()
    assert pack_logprobs(flat, int32(7, 8)) == Logprobs(values, ranks=int32(1, 1))


def test_packing_agrees_with_a_plain_sort_on_random_positions():
    rng = random.Random(0)
    flat, expected = Flat(), []
    for _ in range(200):
        best = sorted(rng.sample(range(50), 5))
        logprobs = sorted((-rng.random() * 4 for _ in best), reverse=True)
        top = list(zip(best, logprobs, range(1, 6), strict=True))
        sampled = rng.choice([rng.choice(top), (99, -5.0, 6)])
        flat.add(sampled, *top)
        expected.append([entry[0] for entry in dict.fromkeys([*top, sampled])])
    assert unpacked(pack_logprobs(flat, b""))[1] == expected


def test_non_finite_values_are_null_and_floats_round_trip_as_float32():
    values = np.array([-1.6612, np.nan, -np.inf, -0.1], dtype=np.float32)
    ids = np.arange(4, dtype=np.int32)
    completion = Completion(
        ids.tobytes(), "length", Logprobs(values.tobytes(), ids.tobytes()), [(0, 0)]
    )
    reply = json_reply([ids], [Completed(1, 1, [completion], 0)], with_logprobs=True)
    read = [entry[0] for entry in orjson.loads(b"".join(reply))["logprobs"][0]]
    assert read[1] is None
    assert read[2] is None
    assert np.float32(read[0]) == values[0]
    assert np.float32(read[3]) == values[3]


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\xff" * 9, b"\x93\x01\x02\x03"])
def test_undecodable_frames_are_refused(frame):
    for decode in (messages.decode_to_worker, messages.decode_from_worker):
        with pytest.raises(msgspec.MsgspecError):
            decode(frame)


def test_a_number_that_a_worker_could_not_pass_on_is_refused():
    def command(limit: int) -> bytes:
        action = commands.GatherRequests(limit)
        return msgspec.msgpack.encode(commands.Command("incarnation", 1, action))

    messages.decode_to_worker(command(2**40))
    with pytest.raises(msgspec.ValidationError, match=r"\.limit"):
        messages.decode_to_worker(command(2**40 + 1))


def floats_of(
    kind: inspect.Type, where: str, seen: set[type]
) -> Iterator[tuple[str, inspect.FloatType]]:
    """Each number of seconds, and of others, in a type, with the field that has it."""
    if isinstance(kind, inspect.FloatType):
        yield where, kind
    inner = [getattr(kind, name, None) for name in ("type", "item_type", "key_type", "value_type")]
    for one in (*inner, *getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
        if one is not None:
            yield from floats_of(one, where, seen)
    if isinstance(kind, inspect.StructType) and kind.cls not in seen:
        seen.add(kind.cls)
        for one in kind.fields:
            yield from floats_of(one.type, f"{kind.cls.__name__}.{one.name}", seen)


@pytest.mark.parametrize("kind", [messages.ToWorker, messages.FromWorker], ids=["to", "from"])
def test_no_message_has_a_number_that_is_none(kind: object):
    """A NaN in a timer would stop the heartbeats: asyncio's timers are a heap, which NaN has no place in."""
    found = dict(floats_of(inspect.type_info(kind), "", set()))
    assert len(found) > 2
    assert [where for where, one in found.items() if one.ge is None or one.le is None] == []
    action = commands.TryConnections(["tcp://127.0.0.1:1"], float("nan"))
    with pytest.raises(messages.UNREADABLE, match="timeout_s"):
        messages.decode_to_worker(messages.encode(commands.Command("a", 1, action)))


def test_messages_round_trip():
    completion = Completion(b"1234", "stop", Logprobs(b"1", b"2", b"3"), [(1, 0), (2, 5)])
    for message in (
        messages.Results([Completed(1, 2, [completion], 3), messages.Failed(1, 2, "c", "m")]),
        messages.Stopping("why"),
        messages.EndWaiting("call", ["id"]),
        messages.ListRequests("call", 5),
    ):
        assert messages.decode_from_worker(messages.encode(message)) == message
    ended = messages.EndedWaiting("call", 3, ["rid"])
    info = messages.RequestInfo(
        id="a", job_ids=[], route="/generate", client="host:1", key="", age_s=0.5, phase="running",
        num_prompts=1, num_completions=2, tokens_in=3, tokens_out=4, workers=["0"], model="m",
    )  # fmt: skip
    listed = messages.ListedRequests("call", "f", 1, [info])
    for message in (messages.Hello(), messages.Abort([(1, 2)]), ended, listed):
        assert messages.decode_to_worker(messages.encode(message)) == message


def test_curve_key_is_created_once_and_private(tmp_path):
    path = tmp_path / "keys" / "curve"
    public, secret = read_curve_key(str(path))
    assert zmq.curve_public(secret) == public
    assert read_curve_key(str(path)) == (public, secret)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_without_a_key_is_refused(tmp_path):
    path = tmp_path / "curve"
    path.write_text("no key")
    with pytest.raises(ConfigError, match="curve_key_file"):
        read_curve_key(str(path))


def test_a_key_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="make space, or name another file"):
        read_curve_key(str(tmp_path / "file" / "curve"))


def test_a_too_long_socket_path_is_refused():
    with pytest.raises(ConfigError, match=str(MAX_IPC_PATH_BYTES)):
        worker_endpoint("/" + "x" * 120, 0)


def test_host_names_are_resolved_and_addresses_are_not():
    assert is_named("tcp://worker:5555")
    assert not is_named("tcp://10.0.0.1:5555")
    assert not is_named("tcp://[::1]:5555")
    assert not is_named("ipc:///tmp/x")
    assert "tcp://127.0.0.1:5555" in look_up("tcp://localhost:5555")


def test_options_travel_once_for_all_jobs():
    options = [
        msgspec.Raw(encode_options(SamplingOptions(extra_args={"a": letter * 10_000})))
        for letter in "ab"
    ]
    jobs = [Job(number, 1, b"\1\0\0\0", 1, 2, options[number % 2]) for number in range(100)]
    frame = messages.encode(messages.Generate.of_jobs("x", jobs))
    assert len(frame) < 45_000
    # The front end's jobs keep their options: another worker may need them.
    assert all(job.sampling is options[number % 2] for number, job in enumerate(jobs))
    message = messages.decode_to_worker(frame)
    assert isinstance(message, messages.Generate)
    received = message.whole_jobs()
    assert [bytes(job.sampling) for job in received] == [bytes(job.sampling) for job in jobs]
    assert len({id(job.sampling) for job in received}) == 2
    broken = messages.Generate("x", jobs[:1], [])
    with pytest.raises((IndexError, msgspec.DecodeError)):
        broken.whole_jobs()


def test_only_workers_give_up_connections_between_hosts_after_20_s_without_traffic(tmp_path: Path):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    key_file = str(tmp_path / "key")
    try:
        for endpoint, seconds in ((f"ipc://{tmp_path}/worker-0", None), ("tcp://127.0.0.1:*", 20)):
            socket = bind_router(context, endpoint, key_file)
            assert (socket.heartbeat_timeout // 1000 if socket.heartbeat_ivl else None) == seconds
            # libzmq 4.3.5 ends a process that has both a bound of unread messages and heartbeats.
            front_end = connect_dealer(context, socket.last_endpoint.decode(), key_file)
            assert front_end.rcvhwm
            assert not front_end.heartbeat_ivl
    finally:
        context.destroy(linger=0)


def test_an_endpoint_in_use_is_refused_with_who_has_it(tmp_path):
    key_file = str(tmp_path / "key")
    with socket.socket() as other, zmq.Context() as context:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"process {os.getpid()} .* has its port"):
            bind_router(context, f"tcp://127.0.0.1:{port}", key_file)
        assert f"got {port}, which process {os.getpid()}" in fault_of_listening("127.0.0.1", port)
    assert fault_of_listening("127.0.0.1", port) == ""
    assert "192.0.2.1:80" in fault_of_listening("192.0.2.1", 80)
    assert "nowhere.invalid:80" in fault_of_listening("nowhere.invalid", 80)
