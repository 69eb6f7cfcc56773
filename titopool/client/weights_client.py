"""The trainer's side of weight updates: sends a model's tensors to all workers of a server.

    client = WeightsClient("http://server:8000", device="cuda:0")
    client.update(model.named_parameters(), version=step, policy="keep")

Needs torch and msgspec only; NCCL between GPUs, gloo between CPUs. Whatever fails between trainer and
server raises `WeightsError`, whose text is the server's where it gave one; the next `update` forms a
new group by itself.
"""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from titopool.client.server_calls import WeightsError, own_address, post_or_get
from titopool.client.trainer_group import TrainerGroup
from titopool.wire.commands import PauseMode, TensorInfo
from titopool.wire.weight_plan import DEFAULT_BUCKET_BYTES, checksum, plan_buckets, views_of

__all__ = ["WeightsClient", "WeightsError"]

# One is filled while the other is on its way.
NUM_BUFFERS = 2
# What an answer to /weights/begin has.
BEGUN = {"update": str, "missing": list, "ignored": list, "kept": list}
# How long the server may take to say why, once a group cannot form.
REASON_S = 5.0


class WeightsClient:
    """One trainer's connection to one server; for one thread."""

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
        """Opens nothing yet.

        Args:
            device: of the tensors; None: the current GPU, or the CPU where there is none.
            api_key: the server's `admin_key`, or its `api_key` where it has no other.
            host: this machine's address as the workers reach it; None: as it reaches the server.
            timeout_s: of each step, calls and broadcasts alike.
            bucket_bytes: what one broadcast carries, about; the device needs two such buffers.
        """
        self._url = url.rstrip("/")
        self._given_device = device
        self._host = host
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._session = ""
        self._group: TrainerGroup | None = None
        # What waits for a bucket to have left, and its buffer.
        self._under_way: list[tuple[Callable[[], Any], Any]] = []

    # ---- calls -----------------------------------------------------------------------

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        fields: Mapping[str, type] | None = None,
    ) -> dict[str, Any]:
        """The answer to a POST of `body`, or to a GET without one.

        Args:
            fields: what the answer must have, each with its type.

        Raises:
            WeightsError: the server refused, cannot be reached, or something else answered.
        """
        # The server holds the deadlines; this one is for a server that is gone.
        timeout_s = 2 * self._timeout_s + 30
        return post_or_get(
            self._url, path, body, api_key=self._api_key, fields=fields or {}, timeout_s=timeout_s
        )

    def update_from_folder(
        self, path: str, *, policy: PauseMode, version: int | None = None
    ) -> dict[str, Any]:
        """Lets every worker load the safetensors in `path`, below the server's `weights_root`."""
        body = {"path": path, "policy": policy, "version": version}
        return self.call("/update_weights", body)

    def pause(self, mode: PauseMode, *, lease_s: float) -> None:
        """Stops generation for at most `lease_s`; again: renews the lease."""
        self.call("/pause", {"mode": mode, "lease_s": lease_s})

    def resume(self) -> None:
        """Ends a pause."""
        self.call("/resume", {})

    # ---- the group -------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether there is a group."""
        return self._group is not None

    def open(self) -> None:
        """Forms the group with all workers; `update` does it if need be.

        Raises:
            WeightsError: a worker is not there, another trainer is, or it took too long.
        """
        answer = self.call("/get_world_size", fields={"world_size": int})
        host = self._host or own_address(self._url)
        self._session = uuid.uuid4().hex
        world_size = answer["world_size"] + 1
        try:
            group = TrainerGroup(self._device(), world_size, timeout_s=self._timeout_s)
        except Exception as error:
            raise WeightsError(f"this process cannot be part of a group: {error}") from error
        try:
            self._form(group, host, world_size)
        except BaseException:
            group.abort()
            raise
        self._group = group

    def _form(self, group: TrainerGroup, host: str, world_size: int) -> None:
        body = {
            "session": self._session,
            "backend": group.backend,
            "host": host,
            "port": group.port,
            "world_size": world_size,
        }
        if group.device_uuid:
            body["device_uuid"] = group.device_uuid
        # The answer comes when all are in the group, so this process joins meanwhile.
        answer: list[WeightsError | None] = []
        asking = threading.Thread(target=self._ask_to_join, args=(body, answer), daemon=True)
        asking.start()
        failure = _error_of(lambda: group.form(gives_up=lambda: any(answer)))
        if failure is not None:
            # The workers see that its port is closed, and the server answers.
            group.abort()
        asking.join(self._timeout_s if failure is None else REASON_S)
        refusal = answer[0] if answer else None
        if refusal is not None:
            raise refusal from failure
        if failure is not None:
            raise WeightsError(f"the group did not form: {failure}") from failure
        if not answer:
            raise WeightsError(
                f"/weights/init: the group formed, but no answer came within {self._timeout_s:g} s"
            )

    def _ask_to_join(self, body: dict[str, Any], answer: list[WeightsError | None]) -> None:
        """Appends why not, or None, to `answer`: whatever happens, `open` waits for it."""
        try:
            self.call("/weights/init", body)
            answer.append(None)
        except WeightsError as error:
            answer.append(error)
        except BaseException as error:
            answer.append(WeightsError(f"/weights/init: {type(error).__name__}: {error}"))

    def close(self) -> None:
        """Leaves the group, if there is one."""
        if not self.is_open:
            return
        try:
            self.call("/weights/close", {"session": self._session})
        finally:
            self._forget()

    def _forget(self) -> None:
        group, self._group, self._under_way = self._group, None, []
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
        """Sends tensors and commits them; all workers serve them when it returns.

        Args:
            tensors: (name, tensor) as in the model's checkpoint; any float dtype.
            policy: what becomes of requests under way: "keep", "drain" or "abort".
            version: of the new weights; None: one more than now.
            partial: not all of the model's tensors come; each layer must be whole.
            with_checksum: the server compares a digest of what it received.

        Returns:
            `version`, `loaded` (number of tensors), `checksum`, and names: `missing`, `ignored`
            (without a place in the model), `kept` (buffers that did not come and stay).

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
        packed = self._pack(infos, [tensor for _, tensor in named])
        ahead: list[Any] = []
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._begin, infos, version, partial)
            # Meanwhile the first buckets are filled; the server's refusal is told before our own.
            failure = _error_of(lambda: ahead.extend(itertools.islice(packed, NUM_BUFFERS)))
            begun = answer.result()
        try:
            if failure is not None:
                raise failure
            self._send(emptied(ahead, packed))
            body: dict[str, Any] = {"update": begun["update"], "policy": policy}
            if with_checksum:
                body["checksum"] = checksum([tensor for _, tensor in named])
            # The workers wait for what is still on its way.
            result = self.call("/weights/commit", body)
        except Exception as error:
            told = error if isinstance(error, WeightsError) else None
            if told is None or told.status:
                self._abort(begun["update"], str(error))
            self._forget()
            if told is not None:
                raise
            raise WeightsError(f"sending failed: {error}") from error
        if _error_of(lambda: self._wait_for_sent(0)):
            # The new weights serve all the same; the next update forms a new group.
            self._forget()
        elif result.get("lost"):
            # A member is gone that will be back: the next update forms a group with it.
            _error_of(self.close)
        return {**{name: begun[name] for name in ("missing", "ignored", "kept")}, **result}

    def _begin(self, infos: list[TensorInfo], version: int | None, partial: bool) -> dict[str, Any]:
        body = {
            "session": self._session,
            "names": [info.name for info in infos],
            "dtypes": [info.dtype for info in infos],
            "shapes": [info.shape for info in infos],
            "version": version,
            "bucket_bytes": self._bucket_bytes,
            "partial": partial,
        }
        try:
            return self.call("/weights/begin", body, fields=BEGUN)
        except WeightsError as error:
            if error.status != 400:
                # What was refused for its tensors leaves the group as it is.
                self._forget()
            raise

    def _abort(self, update: str, reason: str) -> None:
        try:
            self.call("/weights/abort", {"update": update, "reason": reason[:500]})
        except WeightsError:
            # It has ended by itself, or will at its deadline.
            pass

    def _pack(self, infos: list[TensorInfo], tensors: list[Any]) -> Iterator[Any]:
        """The buckets' buffers, filled one by one."""
        import torch

        device = self._device()
        begin = 0
        for bucket in plan_buckets(infos, self._bucket_bytes):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
            views = views_of(buffer, bucket)
            sources = tensors[begin : begin + len(views)]
            torch._foreach_copy_(views, sources, non_blocking=True)
            begin += len(views)
            yield buffer

    def _send(self, buffers: Iterable[Any]) -> None:
        """Sends all; the last ones may still be on their way."""
        for buffer in buffers:
            self._under_way.append((self._broadcast(buffer), buffer))
            self._wait_for_sent(NUM_BUFFERS - 1)

    def _wait_for_sent(self, num_left: int) -> None:
        """Waits until at most `num_left` buckets are on their way."""
        while len(self._under_way) > num_left:
            wait, _ = self._under_way.pop(0)
            wait()

    def _broadcast(self, buffer: Any) -> Callable[[], Any]:
        """Begins to send; returns what waits for the end of it."""
        assert self._group is not None
        return self._group.broadcast(buffer, look=self._check_workers)

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
    try:
        do()
    except Exception as error:
        return error
    return None


def emptied(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """What is in `first`, which keeps nothing of it, and then `rest`."""
    while first:
        yield first.pop(0)
    yield from rest
