"""A front end's socket to a worker, for tests that send its frames themselves."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq

from harness.servers import wait_until
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire import messages
from titopool.wire.messages import Completed, Generate, Heartbeat, Job, Results
from titopool.wire.sockets import connect_dealer


class Peer:
    """A front end's socket, and the messages from its worker."""

    def __init__(self, context: zmq.Context[Any], endpoint: str):
        self.socket = connect_dealer(context, endpoint, "")
        self.beats: list[Heartbeat] = []
        self.done: dict[int, Completed] = {}

    def send(self, message: Any) -> None:
        self.socket.send(messages.encode(message))

    def read(self) -> None:
        while self.socket.poll(0):
            match messages.decode_from_worker(self.socket.recv()):
                case Heartbeat() as beat:
                    self.beats.append(beat)
                case Results(results=results):
                    self.done |= {one.job_id: one for one in results if isinstance(one, Completed)}

    def wait(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: (self.read(), condition())[1], 10)

    def generate(self, job_id: int) -> None:
        ids = np.array([1, 2, job_id], np.int32).tobytes()
        job = Job(job_id, 1, ids, 1, 19, msgspec.Raw(encode_options(SamplingOptions())))
        self.send(Generate.of_jobs(self.beats[-1].incarnation, [job]))
