"""The trainer's side of weight updates: sends a model's tensors to all workers of a server.

    client = WeightsClient("http://server:8000", device="cuda:0")
    client.update(model, version=step, policy="keep")

Needs only torch and msgspec. Sends over NCCL between GPUs, over gloo between CPUs. Every failure
raises `WeightsError`, with the server's message if the server sent one. After a failure the next
`update` forms a new group.
"""

import contextlib
import functools
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from titopool.client.weights.adapters import save_lora
from titopool.client.weights.packing import messages_of
from titopool.client.weights.server_calls import NoResponse, WeightsError, own_address, post_or_get
from titopool.client.weights.sources import Names, Source, join_update
from titopool.client.weights.trainer_group import TrainerGroup, run_in_thread
from titopool.wire.pool_state import CacheMode, PauseMode
from titopool.wire.weight_plan import DEFAULT_CHUNK_BYTES, Checksum

__all__ = ["WeightsClient", "WeightsError", "join_update"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# One chunk is filled while the other is sent.
NUM_CHUNKS = 2
# Fields of the response of /weights/begin.
BEGIN_FIELDS = {"update": str, "missing": list, "ignored": list, "kept": list}
# Time for the server to give its reason after this side failed to form the group.
REASON_TIMEOUT_S = 5.0
# Between looks at the workers, for one look, and how long none may be answered.
POLL_S, LOOK_TIMEOUT_S, SILENCE_S = 0.5, 10.0, 60.0
# Of errors that leave open what became of a commit; "": the answer was lost, or is not the server's.
UNSURE_CODES = {"", "deadline_passed", "internal_error"}


def raises_only_weights_error(method: Callable[P, R]) -> Callable[P, R]:
    """`method`, with every other exception of its work as the cause of a WeightsError."""

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return method(*args, **options)
        except WeightsError:
            raise
        except Exception as error:
            text = f"{method.__name__}: expected no error, got {type(error).__name__}: {error}"
            raise WeightsError(text) from error

    return call


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
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        names: Names | None = None,
    ):
        """Connects to nothing yet.

        Args:
            device: device of the tensors. None: the current GPU, or the CPU without a GPU.
            host: this machine's address, as the workers reach it. None: the address from which
                this machine reaches the server.
            api_key: the server's `admin_key`; its `api_key` if it has no `admin_key`.
            timeout_s: timeout of each step: each HTTP call and each broadcast.
            chunk_bytes: a broadcast carries at least this many bytes, and at most one tensor more.
                0: each tensor has a broadcast of its own. The device holds two chunks, and a
                tensor that is being gathered.
            names: the server's name of each tensor, by the trainer's: a function, or a mapping
                whose other names stay. None: they are the same.

        Raises:
            WeightsError: `chunk_bytes` is negative, or `timeout_s` is not positive.
        """
        if not (isinstance(chunk_bytes, int) and chunk_bytes >= 0 and timeout_s > 0):
            raise WeightsError(
                "chunk_bytes, timeout_s: expected a whole number of at least 0 and a positive "
                f"number, got {chunk_bytes!r} and {timeout_s}"
            )
        self._url = url.rstrip("/")
        self._given_device = device
        self._host = host
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._chunk_bytes = chunk_bytes
        self._names = names
        # Asked while a group forms, before each broadcast and before a commit.
        self.should_stop: Callable[[], bool] = lambda: False
        # The end of this client's pause (monotonic); later ones are others'.
        self._paused_until = 0.0
        self._session = ""
        self._group: TrainerGroup | None = None
        # Broadcasts: (function that waits for the end, message).
        self._in_flight: list[tuple[Callable[[], Any], Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends a pause of this client and leaves the group, so that the server can be used.

        Raises nothing: a pause ends with its lease, and the group with this process.
        """
        if time.monotonic() < self._paused_until:
            _error_of(self.resume)
        _error_of(self.close)

    # ---- calls -----------------------------------------------------------------------

    @raises_only_weights_error
    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        fields: Mapping[str, type] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """The response to a POST of `body`, or to a GET if there is no body.

        Args:
            fields: required fields of the response, with their types.
            timeout_s: time without progress; None: longer than the server's own deadlines.

        Raises:
            WeightsError: the server refused or cannot be reached, or the response is not the
                server's.
        """
        return post_or_get(
            self._url, path, body,
            api_key=self._api_key, fields=fields or {},
            timeout_s=self._call_timeout_s if timeout_s is None else timeout_s,
        )  # fmt: skip

    @property
    def _call_timeout_s(self) -> float:
        """The server has deadlines of its own. This timeout is for a server that is lost."""
        return 2 * self._timeout_s + 30

    @raises_only_weights_error
    def update_from_folder(
        self,
        path: str,
        *,
        policy: PauseMode,
        version: int | None = None,
        cache: CacheMode = "clear",
    ) -> dict[str, Any]:
        """Every worker loads the safetensors files in `path`, below the server's `weights_root`.

        Args:
            policy, version, cache: as of `update`.

        Raises:
            WeightsError: the old weights serve, unless the text says otherwise. With `status` 0 the
                answer was lost, and the new ones may serve: `GET /weights` says it.
        """
        body = {"path": path, "policy": policy, "version": version, **_unless_default(cache)}
        return self.call("/update_weights", body)

    @raises_only_weights_error
    def load_lora(
        self, name: str, folder: str, *, model: Any = None, version: int | None = None
    ) -> dict[str, Any]:
        """Every worker loads a LoRA adapter from a folder; requests choose it by `name`.

        Args:
            folder: below the server's `weights_root`, with the same path here if there is `model`.
                A worker that restarts reads it again, so each version has a folder of its own.
            model: PEFT's model, whose active adapter is written to `folder` first. None: the folder
                has the adapter already.
            version: of the adapter. None: one more than the loaded version.

        Returns:
            `lora_name` and `version`.

        Raises:
            WeightsError: the server or the engine refused the adapter, or it cannot be written: the
                folder is not empty, or the model's parameters are sharded. With `status` 0 the answer
                was lost, and the adapter may be loaded: `GET /weights` has its version.
        """
        path = folder if model is None else save_lora(model, folder)
        body = {"lora_name": name, "lora_path": path, "version": version}
        return self.call("/v1/load_lora_adapter", body)

    @raises_only_weights_error
    def pause(self, mode: PauseMode, *, lease_s: float) -> None:
        """Pauses generation for at most `lease_s` seconds, or renews the lease of a pause.

        Raises:
            WeightsError: the server refused, and what another client has paused stays so; or it is
                not known whether generation is paused, and the end of the block resumes it.
        """
        is_refused = False
        try:
            self.call("/pause", {"mode": mode, "lease_s": lease_s})
        except WeightsError as error:
            is_refused = bool(error.code) and error.status < 500
            raise
        finally:
            if not is_refused:
                self._paused_until = time.monotonic() + lease_s

    @raises_only_weights_error
    def resume(self) -> None:
        """Ends a pause."""
        self.call("/resume", {})
        self._paused_until = 0.0

    # ---- the group -------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether this client has a group with the workers."""
        return self._group is not None

    @raises_only_weights_error
    def open(self) -> None:
        """Forms the group with all workers, if there is none. `update` calls it.

        Raises:
            WeightsError: a worker is not ready, another trainer has a group, or a timeout passed.
        """
        if self.is_open:
            return
        num_ranks = self.call("/get_world_size", fields={"world_size": int})["world_size"]
        if num_ranks < 1:
            raise WeightsError(f"/get_world_size: expected at least 1, got {num_ranks}")
        host = self._host or own_address(self._url)
        self._session = uuid.uuid4().hex
        try:
            group = TrainerGroup(self._device(), num_ranks + 1, timeout_s=self._timeout_s)
        except Exception as error:
            raise WeightsError(
                "device: expected a device from which this process can send, got "
                f"{self._given_device}: {error}; pass a GPU of this process, or cpu"
            ) from error
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
            _error_of(group.abort)
            raise
        self._group = group

    def _form(self, group: TrainerGroup, body: dict[str, Any]) -> None:
        # The server answers when all ranks have joined, so this process joins during the call.
        answer = run_in_thread(lambda: self.call("/weights/init", body))
        failure = _error_of(
            lambda: group.form(
                should_stop=lambda: (
                    self.should_stop() or (answer.done() and answer.exception() is not None)
                )
            )
        )
        if failure is not None:
            # The closed port ends the workers' wait, so the server answers.
            _error_of(group.abort)
        wait([answer], self._timeout_s if failure is None else REASON_TIMEOUT_S)
        refusal = answer.exception() if answer.done() else None
        if isinstance(refusal, WeightsError):
            raise refusal from failure
        if refusal is not None:
            raise WeightsError(f"/weights/init: {type(refusal).__name__}: {refusal}") from refusal
        if failure is not None:
            raise WeightsError(
                f"expected a group with all workers, got {type(failure).__name__}: {failure}"
            ) from failure
        if not answer.done():
            raise WeightsError(
                f"/weights/init: expected the server's answer within {self._timeout_s:g} s after the "
                "group had formed, got none; open it again"
            )

    @raises_only_weights_error
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
            # The group ends with this process at the latest.
            _error_of(group.abort)

    # ---- an update -------------------------------------------------------------------

    @raises_only_weights_error
    def update(
        self,
        tensors: Any,
        *,
        policy: PauseMode,
        version: int | None = None,
        partial: bool = False,
        with_checksum: bool = False,
        cache: CacheMode = "clear",
        metadata: Iterable[tuple[str, Any, Any]] | None = None,
    ) -> dict[str, Any]:
        """Sends tensors and commits them. All workers serve the new weights when it returns.

        Args:
            tensors: named as in the model's checkpoint, of any float dtype. A module (its
                parameters), a state dict, a list of (name, tensor), or a function that returns an
                iterator of these. It is iterated twice: for names and shapes, then to send one
                tensor after another. An iterator can be iterated only once, so its tensors are all
                kept meanwhile, unless there is `metadata`. Parameters of FSDP2 and ZeRO-3 are
                gathered one at a time; the trainer's other processes call `join_update`. Of a model
                with LoRA adapters of PEFT, pass the model: its active adapters are merged into the
                base weights while these are sent, and the model itself does not change.
            policy: pause mode for requests in flight: "keep", "drain" or "abort".
            version: of the new weights. None: the present version plus one.
            partial: only some tensors of the model are sent. Each layer must be complete.
            with_checksum: the workers compare a checksum of what they received.
            cache: of requests that go on. "clear": they compute their keys and values again, which is
                exact. "keep": they go on with those of the earlier weights, which costs nothing;
                requests that begin later read none of these. It needs room beside the model or in
                the host's memory. "prefer_keep": as "keep" where there is that room, else "clear".
            metadata: (name, dtype, shape) of each tensor. `tensors` is then iterated once.

        Returns:
            `version`, `previous_version` (not below it if the trainer has gone back), `loaded`
            (number of tensors), `checksum`, `staging` (where the first worker kept the tensors:
            "beside" the model, "kv" cache, "in_place" or "host"), `cache` ("clear" or "keep": what
            was done), `update_s` (from its begin until
            the new weights served), `paused_s` (how long it stopped generation), and lists of
            names: `missing`, `ignored` (sent, but not in the model) and `kept` (buffers that were
            not sent). Where the commit's answer was lost and the workers say that the new weights
            serve, `previous_version`, `loaded`, `cache` and `checksum` are None.

        Raises:
            WeightsError: the old weights serve, unless the text says that a worker restarts or waits
                for weights, or that it is not known which weights serve.
        """
        source = Source(tensors, metadata, self._names)
        try:
            return self._update(source, policy, version, partial, with_checksum, cache)
        except Exception:
            source.gather_rest()
            raise
        except BaseException:
            # Ctrl-C. The closed port ends the update at the workers.
            self._drop_group()
            raise

    def _update(
        self,
        source: Source,
        policy: PauseMode,
        version: int | None,
        partial: bool,
        with_checksum: bool,
        cache: CacheMode,
    ) -> dict[str, Any]:
        had_group = self.is_open
        self.open()
        digest = Checksum() if with_checksum else None
        begun, messages = self._begin(
            source, digest, version, partial, policy, cache, may_reopen=had_group
        )
        try:
            self._send(messages)
            self.check_going_on()
            body: dict[str, Any] = {"update": begun["update"], "policy": policy}
            if digest is not None:
                body["checksum"] = digest.digest()
            # The workers wait for the broadcasts in flight.
            result = self._commit(begun["update"], body)
        except Exception as error:
            self._fail(begun["update"], error)
        if _error_of(lambda: self._wait_for_sent(0)):
            # The new weights serve. The next update forms a new group.
            self._drop_group()
        elif result.get("lost") or result.get("outside"):
            # A lost worker restarts, or one has joined the pool. The next update's group has it.
            _error_of(self.close)
        return {**{name: begun[name] for name in ("missing", "ignored", "kept")}, **result}

    def _begin(
        self,
        source: Source,
        digest: Checksum | None,
        version: int | None,
        partial: bool,
        policy: PauseMode,
        cache: CacheMode,
        *,
        may_reopen: bool,
    ) -> tuple[dict[str, Any], Iterator[Any]]:
        """The response of /weights/begin, and the messages to send.

        With `may_reopen`, workers may have left or restarted since the group formed: a new group
        then takes its place.

        The first messages are filled during the call. Where that fails, the messages raise the
        error, so that a refusal of the server comes before it.
        """
        body = {
            "session": self._session,
            "names": [info.name for info in source.infos],
            "dtypes": [info.dtype for info in source.infos],
            "shapes": [info.shape for info in source.infos],
            "version": version,
            "chunk_bytes": self._chunk_bytes,
            "partial": partial,
            "policy": policy,
            "checksum": digest is not None,
            **_unless_default(cache),
        }
        begin = lambda: self.call("/weights/begin", body, fields=BEGIN_FIELDS)  # noqa: E731
        answer = run_in_thread(begin)
        messages = messages_of(source, self._chunk_bytes, self._device(), digest)
        first: list[Any] = []
        failure = _error_of(lambda: first.extend(itertools.islice(messages, NUM_CHUNKS)))
        try:
            begun = answer.result()
        except WeightsError as error:
            # A refusal of the tensors (status 400) leaves the group intact.
            if error.status != 400:
                self._drop_group()
            if error.status != 409 or not may_reopen:
                raise
            self.open()
            begun = self.call("/weights/begin", body | {"session": self._session})
        return begun, _chained(first, messages, failure)

    def _commit(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        """The response of /weights/commit, or what the workers say where it is lost."""
        try:
            return self.call("/weights/commit", body)
        except WeightsError as error:
            if error.code not in UNSURE_CODES:
                raise
            return self._outcome(update, error)

    def _outcome(self, update: str, lost: WeightsError) -> dict[str, Any]:
        """The result of a commit without an answer, of which `lost` says why.

        Raises:
            WeightsError: the old weights serve, or nobody says what serves (`NoResponse`).
        """
        logger.warning("%s; asking the workers which weights serve", lost)
        begin = answered = time.monotonic()
        known = ""
        while (now := time.monotonic()) - begin < self._call_timeout_s:
            if self.should_stop() or now - answered > SILENCE_S:
                break
            workers: list[dict[str, Any]] = []
            with contextlib.suppress(WeightsError):
                found = self.call("/weights", fields={"workers": list}, timeout_s=LOOK_TIMEOUT_S)
                workers = [one for one in found["workers"] if isinstance(one, dict)]
                answered = time.monotonic()
            states = {one.get("state") for one in workers if one.get("update") == update}
            applied = [one for one in workers if one.get("last_update") == update]
            if applied and not states:
                return _result_of(applied[0], [one for one in workers if one not in applied])
            if workers and not states and all("last_update" in one for one in workers):
                if all(map(_has_dropped, workers)):
                    raise WeightsError(
                        f"{lost}; the workers have dropped the update: {_ends(workers)}",
                        status=lost.status, code=lost.code or "weight_update_failed",
                    )  # fmt: skip
                # They have restarted since, or another update has begun.
                versions = sorted({str(one.get("weight_version")) for one in workers})
                known = (
                    f", and the workers serve version {', '.join(versions)} without knowing of it"
                )
                break
            if states == {"receiving"} and now - begin > REASON_TIMEOUT_S:
                # The call has not reached the workers, and must not do so later.
                body = {"update": update, "reason": str(lost)[:500]}
                _error_of(functools.partial(self.call, "/weights/abort", body))
            time.sleep(POLL_S)
        raise NoResponse(
            f"{lost}; it is not known whether the new weights serve{known}: `last_update` in GET "
            f"/weights is {update} where they do; send the update again if they do not",
            status=lost.status, code=lost.code,
        )  # fmt: skip

    def _fail(self, update: str, error: Exception) -> NoReturn:
        """Aborts an update that has begun and raises `error` as a WeightsError."""
        restarting: list[str] = []
        if not isinstance(error, NoResponse):
            body = {"update": update, "reason": str(error)[:500]}
            # If this call fails, the update has ended already or ends at its deadline.
            with contextlib.suppress(Exception):
                restarting = self.call("/weights/abort", body).get("restarting", [])
        self._drop_group()
        restarts = (
            f"; these workers restart and wait for weights: {', '.join(restarting)}"
            if restarting
            else ""
        )
        if isinstance(error, WeightsError):
            error.args = (f"{error}{restarts}",)
            raise error
        raise WeightsError(
            f"expected to send all tensors, got {type(error).__name__}: {error}; "
            f"{'' if restarting else 'the old weights serve, and '}the next update forms a new group"
            f"{restarts}"
        ) from error

    def _send(self, messages: Iterable[Any]) -> None:
        """Broadcasts all messages. The last ones may be in flight at the end."""
        assert self._group is not None
        for message in messages:
            self.check_going_on()
            sent = self._group.broadcast(message, check_workers=self._check_workers)
            self._in_flight.append((sent, message))
            self._wait_for_sent(NUM_CHUNKS - 1)

    def check_going_on(self) -> None:
        """Raises WeightsError if `should_stop()`."""
        if self.should_stop():
            raise WeightsError("expected a call that goes on, got its cancel; call it again")

    def _wait_for_sent(self, max_in_flight: int) -> None:
        """Waits until at most `max_in_flight` broadcasts are in flight."""
        while len(self._in_flight) > max_in_flight:
            wait_for_end, _ = self._in_flight.pop(0)
            wait_for_end()

    def _check_workers(self) -> None:
        workers = self.call("/weights", fields={"workers": list})["workers"]
        in_place = any(
            one.get("is_written_in_place") or one.get("is_restarting") for one in workers
        )
        for worker in workers:
            if worker.get("session") != self._session:
                raise WeightsError(
                    f"expected all workers in the group, got worker {worker.get('worker')} outside: "
                    f"{worker.get('last_end')}; {'' if in_place else 'the old weights serve, '}send "
                    "the update again"
                )

    def _device(self) -> Any:
        import torch

        if self._given_device is not None:
            return torch.device(self._given_device)
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _unless_default(cache: CacheMode) -> dict[str, Any]:
    """The field `cache` of a body; servers of before it do not know it."""
    return {} if cache == "clear" else {"cache": cache}


def _error_of(do: Callable[[], Any]) -> Exception | None:
    """What `do` raises."""
    try:
        do()
    except Exception as error:
        return error
    return None


def _result_of(applied: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a commit, by a worker's status after it; `others` have not applied it."""
    return {
        "version": applied.get("weight_version"),
        "previous_version": None,
        "loaded": None,
        "checksum": None,
        "staging": applied.get("last_staging"),
        "cache": None,
        "update_s": applied.get("last_update_s"),
        "paused_s": applied.get("last_paused_s"),
        "lost": [
            {"endpoint": one.get("endpoint"), "error": one.get("last_end") or one.get("state")}
            for one in others
        ],
    }


def _has_dropped(worker: dict[str, Any]) -> bool:
    """Whether a worker's status says that its last update ended without its weights."""
    return bool(
        worker.get("last_end") or worker.get("waits_for_weights") or worker.get("is_restarting")
    )


def _ends(workers: list[dict[str, Any]]) -> str:
    """Why an update ended at the workers, and which weights serve."""
    ends = "; ".join({str(one["last_end"]): "" for one in workers if one.get("last_end")})
    without = [
        str(one.get("worker"))
        for one in workers
        if one.get("waits_for_weights") or one.get("is_restarting")
    ]
    serve = (
        f"these workers restart or wait for weights: {', '.join(without)}"
        if without
        else "the old weights serve"
    )
    return f"{ends}; {serve}" if ends else serve


def _chained(first: list[Any], rest: Iterator[Any], failure: Exception | None) -> Iterator[Any]:
    """`first`, then `rest`; or raises `failure`. Keeps no reference to a buffer that was yielded."""
    if failure is not None:
        raise failure
    while first:
        yield first.pop(0)
    yield from rest
