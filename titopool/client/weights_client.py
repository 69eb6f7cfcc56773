"""The trainer's side of weight updates: sends a model's tensors to all workers of a server.

    client = WeightsClient("http://server:8000", device="cuda:0")
    client.update(model.named_parameters(), version=step, policy="keep")

Needs only torch and msgspec. Sends over NCCL between GPUs, over gloo between CPUs. Every failure
between trainer and server raises `WeightsError`, with the server's message if the server sent one.
After a failure the next `update` forms a new group.
"""

import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from typing import Any, NoReturn

from titopool.client.server_calls import WeightsError, own_address, post_or_get
from titopool.client.trainer_group import TrainerGroup, run_in_thread
from titopool.wire.commands import TensorInfo
from titopool.wire.pool_state import PauseMode
from titopool.wire.weight_plan import DEFAULT_BUCKET_BYTES, checksum, plan_buckets, views_of

__all__ = ["WeightsClient", "WeightsError"]

# One buffer is filled while the other is sent.
NUM_BUFFERS = 2
# Fields of the response of /weights/begin.
BEGIN_FIELDS = {"update": str, "missing": list, "ignored": list, "kept": list}
# Time for the server to give its reason after this side failed to form the group.
REASON_TIMEOUT_S = 5.0


class WeightsClient:
    """One trainer's connection to one server. Not thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        device: Any = None,
        host: str | None = None,
        api_key: str = "",
        timeout_s: float = 300.0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ):
        """Connects to nothing yet.

        Args:
            device: device of the tensors. None: the current GPU, or the CPU without a GPU.
            host: this machine's address, as the workers reach it. None: the address from which
                this machine reaches the server.
            api_key: the server's `admin_key`; its `api_key` if it has no `admin_key`.
            timeout_s: timeout of each step: each HTTP call and each broadcast.
            bucket_bytes: largest broadcast in bytes. A larger tensor is sent alone. The device holds two buffers of this size.
        """
        self._url = url.rstrip("/")
        self._given_device = device
        self._host = host
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._session = ""
        self._group: TrainerGroup | None = None
        # Broadcasts: (function that waits for the end, buffer).
        self._in_flight: list[tuple[Callable[[], Any], Any]] = []

    # ---- calls -----------------------------------------------------------------------

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        fields: Mapping[str, type] | None = None,
    ) -> dict[str, Any]:
        """The response to a POST of `body`, or to a GET if there is no body.

        Args:
            fields: required fields of the response, with their types.

        Raises:
            WeightsError: the server refused or cannot be reached, or the response is not the
                server's.
        """
        # The server has deadlines of its own. This timeout is for a server that is lost.
        timeout_s = 2 * self._timeout_s + 30
        return post_or_get(
            self._url, path, body, api_key=self._api_key, fields=fields or {}, timeout_s=timeout_s
        )

    def update_from_folder(
        self, path: str, *, policy: PauseMode, version: int | None = None
    ) -> dict[str, Any]:
        """Every worker loads the safetensors files in `path`, below the server's `weights_root`."""
        body = {"path": path, "policy": policy, "version": version}
        return self.call("/update_weights", body)

    def pause(self, mode: PauseMode, *, lease_s: float) -> None:
        """Pauses generation for at most `lease_s` seconds, or renews the lease of a pause."""
        self.call("/pause", {"mode": mode, "lease_s": lease_s})

    def resume(self) -> None:
        """Ends a pause."""
        self.call("/resume", {})

    # ---- the group -------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether this client has a group with the workers."""
        return self._group is not None

    def open(self) -> None:
        """Forms the group with all workers. `update` calls it if there is no group.

        Raises:
            WeightsError: a worker is not ready, another trainer has a group, or a timeout passed.
        """
        num_ranks = self.call("/get_world_size", fields={"world_size": int})["world_size"]
        host = self._host or own_address(self._url)
        self._session = uuid.uuid4().hex
        try:
            group = TrainerGroup(self._device(), num_ranks + 1, timeout_s=self._timeout_s)
        except Exception as error:
            raise WeightsError(f"this process cannot be part of a group: {error}") from error
        body = {
            "session": self._session,
            "backend": group.backend,
            "host": host,
            "port": group.port,
            "world_size": num_ranks + 1,
        }
        if group.device_uuid:
            body["device_uuid"] = group.device_uuid
        try:
            self._form(group, body)
        except BaseException:
            group.abort()
            raise
        self._group = group

    def _form(self, group: TrainerGroup, body: dict[str, Any]) -> None:
        # The server answers when all ranks have joined, so this process joins during the call.
        answer = run_in_thread(lambda: self.call("/weights/init", body))
        failure = _error_of(
            lambda: group.form(should_stop=lambda: answer.done() and answer.exception() is not None)
        )
        if failure is not None:
            # The closed port ends the workers' wait, so the server answers.
            group.abort()
        wait([answer], self._timeout_s if failure is None else REASON_TIMEOUT_S)
        refusal = answer.exception() if answer.done() else None
        if isinstance(refusal, WeightsError):
            raise refusal from failure
        if refusal is not None:
            raise WeightsError(f"/weights/init: {type(refusal).__name__}: {refusal}") from refusal
        if failure is not None:
            raise WeightsError(f"the group did not form: {failure}") from failure
        if not answer.done():
            raise WeightsError(
                "/weights/init: the group formed, but the server did not answer within "
                f"{self._timeout_s:g} s"
            )

    def close(self) -> None:
        """Leaves the group, if there is one."""
        if not self.is_open:
            return
        try:
            self.call("/weights/close", {"session": self._session})
        finally:
            self._drop_group()

    def _drop_group(self) -> None:
        group, self._group, self._in_flight = self._group, None, []
        if group is not None:
            group.abort()

    # ---- an update -------------------------------------------------------------------

    def update(
        self,
        tensors: Iterable[tuple[str, Any]],
        *,
        policy: PauseMode,
        version: int | None = None,
        partial: bool = False,
        with_checksum: bool = False,
    ) -> dict[str, Any]:
        """Sends tensors and commits them. All workers serve the new weights when it returns.

        Args:
            tensors: (name, tensor), named as in the model's checkpoint, of any float dtype.
            policy: pause mode for requests in flight: "keep", "drain" or "abort".
            version: of the new weights. None: the present version plus one.
            partial: only some tensors of the model are sent. Each layer must be complete.
            with_checksum: the workers compare a checksum of what they received.

        Returns:
            `version`, `loaded` (number of tensors), `checksum`, and lists of names: `missing`,
            `ignored` (sent, but not in the model) and `kept` (buffers that were not sent).

        Raises:
            WeightsError: the old weights serve, unless the text says that a worker restarts.
        """
        named = [(name, tensor.detach()) for name, tensor in tensors]
        if not self.is_open:
            self.open()
        infos = [
            TensorInfo(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in named
        ]
        values = [tensor for _, tensor in named]
        begun, buffers = self._begin(infos, values, version, partial)
        try:
            self._send(buffers)
            body: dict[str, Any] = {"update": begun["update"], "policy": policy}
            if with_checksum:
                body["checksum"] = checksum(values)
            # The workers wait for the broadcasts in flight.
            result = self.call("/weights/commit", body)
        except Exception as error:
            self._fail(begun["update"], error)
        if _error_of(lambda: self._wait_for_sent(0)):
            # The new weights serve. The next update forms a new group.
            self._drop_group()
        elif result.get("lost"):
            # A lost worker restarts. The next update forms a group with it.
            _error_of(self.close)
        return {**{name: begun[name] for name in ("missing", "ignored", "kept")}, **result}

    def _begin(
        self, infos: list[TensorInfo], values: list[Any], version: int | None, partial: bool
    ) -> tuple[dict[str, Any], Iterator[Any]]:
        """The response of /weights/begin, and the buffers to send.

        The first buffers are filled during the call. Where that fails, the buffers raise the
        error, so that a refusal of the server comes before it.
        """
        body = {
            "session": self._session,
            "names": [info.name for info in infos],
            "dtypes": [info.dtype for info in infos],
            "shapes": [info.shape for info in infos],
            "version": version,
            "bucket_bytes": self._bucket_bytes,
            "partial": partial,
        }
        answer = run_in_thread(lambda: self.call("/weights/begin", body, fields=BEGIN_FIELDS))
        buffers = self._fill_buffers(infos, values)
        first: list[Any] = []
        failure = _error_of(lambda: first.extend(itertools.islice(buffers, NUM_BUFFERS)))
        try:
            return answer.result(), _chained(first, buffers, failure)
        except WeightsError as error:
            # A refusal of the tensors (status 400) leaves the group intact.
            if error.status != 400:
                self._drop_group()
            raise

    def _fail(self, update: str, error: Exception) -> NoReturn:
        """Aborts an update that has begun and raises `error` as a WeightsError."""
        # A WeightsError without a status: the server cannot be reached.
        if not isinstance(error, WeightsError) or error.status:
            reason = str(error)[:500]
            # If this call fails, the update has ended already or ends at its deadline.
            _error_of(lambda: self.call("/weights/abort", {"update": update, "reason": reason}))
        self._drop_group()
        if isinstance(error, WeightsError):
            raise error
        raise WeightsError(f"sending failed: {error}") from error

    def _fill_buffers(self, infos: list[TensorInfo], values: list[Any]) -> Iterator[Any]:
        """Yields the buffer of each bucket. A buffer is filled on demand."""
        import torch

        device = self._device()
        begin = 0
        for bucket in plan_buckets(infos, self._bucket_bytes):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
            views = views_of(buffer, bucket)
            sources = values[begin : begin + len(views)]
            torch._foreach_copy_(views, sources, non_blocking=True)
            begin += len(views)
            yield buffer

    def _send(self, buffers: Iterable[Any]) -> None:
        """Broadcasts all buffers. The last ones may be in flight at the end."""
        assert self._group is not None
        for buffer in buffers:
            sent = self._group.broadcast(buffer, check_workers=self._check_workers)
            self._in_flight.append((sent, buffer))
            self._wait_for_sent(NUM_BUFFERS - 1)

    def _wait_for_sent(self, max_in_flight: int) -> None:
        """Waits until at most `max_in_flight` broadcasts are in flight."""
        while len(self._in_flight) > max_in_flight:
            wait_for_end, _ = self._in_flight.pop(0)
            wait_for_end()

    def _check_workers(self) -> None:
        for worker in self.call("/weights", fields={"workers": list})["workers"]:
            if worker.get("session") != self._session:
                raise WeightsError(
                    f"worker {worker.get('worker')} has left the group: {worker.get('last_end')}"
                )

    def _device(self) -> Any:
        import torch

        if self._given_device is not None:
            return torch.device(self._given_device)
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _error_of(do: Callable[[], Any]) -> Exception | None:
    """What `do` raises."""
    try:
        do()
    except Exception as error:
        return error
    return None


def _chained(first: list[Any], rest: Iterator[Any], failure: Exception | None) -> Iterator[Any]:
    """`first`, then `rest`; or raises `failure`. Keeps no reference to a buffer that was yielded."""
    if failure is not None:
        raise failure
    while first:
        yield first.pop(0)
    yield from rest
