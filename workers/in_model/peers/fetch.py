"""Takes over another worker's weights, byte by byte (`workers/in_model/peers/offer.py`).

Runs in: vLLM's processes that hold the model, on the model's thread: the worker serves nothing
meanwhile. Every wait has a deadline, and ends at once when the other side closes the connection.
"""

import itertools
import time
from collections import deque
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from titopool.deadline import Deadline
from workers.in_model.checkpoint_files import Refused
from workers.in_model.peers.model_bytes import ModelBytes, Plan
from workers.in_model.peers.offer import MAX_BYTES, Question

# Connections, each with an I/O thread: encrypting and copying takes more time than the network.
NUM_CONNECTIONS = 4
# Questions that are sent ahead of their answers, on all connections.
NUM_AHEAD = 2 * NUM_CONNECTIONS
# Until the first answer: the address may be behind a firewall.
CONNECT_TIMEOUT_S = 10.0
# Of an answer: a plan of a hundred thousand tensors has less.
MAX_ANSWER_BYTES = 64 * 2**20
CLOSED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

_decode_plan = msgspec.msgpack.Decoder(Plan).decode
_decode_digests = msgspec.msgpack.Decoder(list[str]).decode


class PeerLost(Exception):
    """The other worker has ended, has new weights, or is too slow."""


class Connection:
    """A connection to an offer; answers come in the order of the questions."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: str):
        """Connects; `address` is host:port."""
        self._address = address
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = True
        self._socket.maxmsgsize = MAX_ANSWER_BYTES
        # Milliseconds. Detects a host that vanished without closing its connection.
        self._socket.heartbeat_ivl = 2_000
        self._socket.heartbeat_timeout = 10_000
        self._socket.curve_serverkey = key.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._monitor = self._socket.get_monitor_socket(CLOSED)
        self._socket.connect(f"tcp://{address}")

    def close(self) -> None:
        self._socket.disable_monitor()

    def ask(self, question: Question) -> None:
        self._socket.send(msgspec.msgpack.encode(question), zmq.NOBLOCK)

    def answer(self, deadline: Deadline) -> Any:
        """The next answer, as a buffer.

        Raises:
            PeerLost: the connection was closed, or no answer came in time.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        events = dict(poller.poll(int(deadline.left_s * 1000)))
        if self._socket in events:
            return bytearray(self._socket.recv(copy=False).buffer)
        if self._monitor in events:
            recv_monitor_message(self._monitor)
            raise PeerLost(
                f"the worker at {self._address} closed the connection: it has ended, or its weights "
                "change"
            )
        raise PeerLost(f"the worker at {self._address} did not answer in time")


class Fetch:
    """Connections to an offer."""

    def __init__(self, address: str, key: str):
        """Connects; `address` is host:port."""
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(NUM_CONNECTIONS)
        self._connections = [
            Connection(self._context, address, key) for _ in range(NUM_CONNECTIONS)
        ]

    def close(self) -> None:
        """Closes the connections."""
        for one in self._connections:
            one.close()
        self._context.destroy(linger=0)

    def compare(self, content: ModelBytes, timeout_s: float) -> None:
        """Compares the other model's plan with the own one.

        Raises:
            Refused: the plans differ, or the other side does not answer.
        """
        deadline = Deadline.after(min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            first = self._connections[0]
            first.ask(Question("plan"))
            plan = _decode_plan(first.answer(deadline))
        except PeerLost as error:
            raise Refused(
                f"{error}; check that workers reach each other, and peer_port with a firewall"
            ) from None
        except msgspec.MsgspecError as error:
            raise Refused(f"the worker at {self._address} sent no plan: {error}") from None
        if text := content.plan.difference(plan):
            raise Refused(
                f"the worker at {self._address} has other tensors: {text}; start both with the same "
                "model and the same options of vLLM"
            )

    def fetch(self, content: ModelBytes, timeout_s: float) -> dict[str, Any]:
        """Overwrites the model with the other one's bytes, and compares digests.

        Returns:
            Bytes, and the seconds of the transfer and of the comparison.

        Raises:
            PeerLost: the transfer did not end, and the model is in an unknown state.
        """
        deadline, begin_s = Deadline.after(timeout_s), time.monotonic()
        num_bytes, begin = content.plan.num_bytes, 0
        asked: deque[tuple[Connection, Question]] = deque()
        turns = itertools.cycle(self._connections)
        while begin < num_bytes or asked:
            while begin < num_bytes and len(asked) < NUM_AHEAD:
                question = Question("bytes", begin, min(MAX_BYTES, num_bytes - begin))
                asked.append((next(turns), question))
                asked[-1][0].ask(question)
                begin += question.num_bytes
            connection, question = asked.popleft()
            data = connection.answer(deadline)
            if len(data) != question.num_bytes:
                raise PeerLost(
                    f"expected {question.num_bytes} bytes of the worker at {self._address}, got "
                    f"{len(data)}"
                )
            content.write(question.begin, data)
        fetched_s = time.monotonic()
        # The other side counts while this one does. It comes last: the bytes may have changed.
        first = self._connections[0]
        first.ask(Question("digests"))
        mine = content.digests()
        try:
            its = _decode_digests(first.answer(deadline))
        except msgspec.MsgspecError as error:
            raise PeerLost(f"the worker at {self._address} sent no digests: {error}") from None
        if mine != its:
            different = [
                block.tensors[0].name
                for block, one, other in zip(content.plan.blocks, mine, its, strict=False)
                if one != other
            ]
            raise PeerLost(
                f"{len(different)} tensors differ from those of the worker at {self._address} after "
                f"the transfer, the first is {different[0]}: it has changed them meanwhile"
            )
        return {
            "bytes": num_bytes,
            "transfer_s": round(fetched_s - begin_s, 4),
            "digest_s": round(time.monotonic() - fetched_s, 4),
        }
