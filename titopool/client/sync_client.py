"""The client that blocks: `AsyncClient` in a thread of its own, so that both do the same.

Runs in: trainers and agents, also within a running event loop (notebooks). Threads may share it.
"""

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from titopool.client.agent_sessions import Session
from titopool.client.async_client import AsyncClient
from titopool.client.results import PromptResult, Score, ServerInfo, WorkerStatus

if TYPE_CHECKING:
    from titopool.client.weights_client import WeightsClient

R = TypeVar("R")
JOIN_TIMEOUT_S = 10.0


class Client:
    """One server's client.

    Every call raises the server's error by its code (`titopool/errors.py`), or an error of
    `titopool/client/failures.py`; all are `TitopoolError`s. A call that is interrupted (Ctrl-C)
    stops its generation.
    """

    _thread: "_LoopThread | None" = None

    def __init__(
        self, base_url: str, *, api_key: str = "", admin_key: str = "", timeout_s: float = 600.0
    ):
        """Connects to nothing yet.

        Args:
            admin_key: for pauses, weights and aborts of all requests; "": `api_key`.
            timeout_s: of each call, with its retries.

        Raises:
            InvalidRequest: `base_url` is no URL, or `timeout_s` is not positive.
        """
        self._client = AsyncClient(
            base_url, api_key=api_key, admin_key=admin_key, timeout_s=timeout_s
        )
        self._is_stopped = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, has the settings and keys, and connections of its own."""
        return {**vars(self), "_thread": None}

    def __del__(self) -> None:
        if self._thread is not None:
            self._thread.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections; the next call opens new ones."""
        with _lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def stop(self) -> None:
        """Closes for good: calls of other threads, also later ones, raise asyncio's CancelledError."""
        self._is_stopped = True
        self.close()

    # ---- generation ------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        *,
        images: Any = None,
        n: int = 1,
        max_tokens: int = 16,
        temperature: float = 1.0,
        logprobs: int | None = 0,
        lora_name: str | None = None,
        min_weight_version: int | None = None,
        session_id: str | None = None,
        request_id: str | None = None,
        idempotent: bool | str = False,
        progress: bool = False,
        **sampling: Any,
    ) -> list[PromptResult]:
        """Generates from prompts.

        Args:
            prompts: a text, token ids (a list or an array of integers), an object with
                `prompt_token_ids` (vLLM's TokensPrompt), or a list of these; one kind in a call.
            images: of one prompt: PIL images, bytes of files or base64; of a list of prompts: a list
                with one entry for each, which is a list of images, an image or None.
            n: completions of each prompt.
            logprobs: 0: the sampled token's. k: the k best, too. None: none.
            lora_name: a LoRA adapter of the server; None: the model alone.
            min_weight_version: wait until the server has this version of the weights or a later one.
            session_id: names a conversation, whose requests prefer one worker.
            request_id: for `abort`.
            idempotent: repeat the request, by a key, if the connection is lost or the server is
                full. It still runs once. A text is the key itself, so that another process may repeat
                the request within 10 minutes. If no repeat follows a lost connection, as after a
                kill of this process, the server stops the request after 30 s.
            progress: show a bar (tqdm). The prompts go out in several requests, which are checked
                one by one. Each has the id and the key of the whole with `-` and the index of its
                first prompt; `abort` of this client takes the whole's id, too.
            sampling: vLLM's SamplingParams (`top_p`, `seed`, `stop`, `ignore_eos`, …), and
                `truncate_prompt_tokens`, `structured_outputs_regex`, `mm_processor_kwargs` and
                `raw_logprobs`.

        Returns:
            One result for each prompt, in order.

        Raises:
            TitopoolError: the server's error by its code, or why there was no answer.
        """
        return self._run(
            lambda client: client.generate(
                prompts, images=images, n=n, max_tokens=max_tokens, temperature=temperature,
                logprobs=logprobs, lora_name=lora_name, min_weight_version=min_weight_version,
                session_id=session_id, request_id=request_id, idempotent=idempotent,
                progress=progress, **sampling,
            )
        )  # fmt: skip

    def chat(
        self,
        conversations: Any,
        *,
        tools: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        n: int = 1,
        max_tokens: int = 16,
        temperature: float = 1.0,
        logprobs: int | None = 0,
        lora_name: str | None = None,
        min_weight_version: int | None = None,
        session_id: str | None = None,
        request_id: str | None = None,
        idempotent: bool | str = False,
        progress: bool = False,
        **sampling: Any,
    ) -> list[PromptResult]:
        """Generates the next message of conversations, with the model's own chat template.

        Args:
            conversations: a conversation (a list of OpenAI's messages) or a list of them. Images are
                parts `{"type": "image", "image": …}` with a PIL image, bytes of a file or base64.
            tools: JSON schemas of functions, for all conversations.

        The other arguments, the results and the errors are those of `generate`.
        """
        return self._run(
            lambda client: client.chat(
                conversations, tools=tools, chat_template_kwargs=chat_template_kwargs, n=n,
                max_tokens=max_tokens, temperature=temperature, logprobs=logprobs,
                lora_name=lora_name, min_weight_version=min_weight_version, session_id=session_id,
                request_id=request_id, idempotent=idempotent, progress=progress, **sampling,
            )
        )  # fmt: skip

    def score(
        self,
        sequences: Sequence[Any],
        prompt_lengths: Sequence[int],
        *,
        top_logprobs: int = 1,
        min_weight_version: int | None = None,
        request_id: str | None = None,
    ) -> list[Score]:
        """The log-probabilities of each sequence of ids after its prompt; generates nothing.

        Args:
            prompt_lengths: [sequences]: the number of ids of each sequence's prompt.
            top_logprobs: also those of the k best tokens, at least 1.

        Raises:
            TitopoolError: as `generate`.
        """
        return self._run(
            lambda client: client.score(
                sequences, prompt_lengths, top_logprobs=top_logprobs,
                min_weight_version=min_weight_version, request_id=request_id,
            )
        )  # fmt: skip

    # ---- agents ----------------------------------------------------------------------

    def session(self, metadata: Mapping[str, Any] | None = None) -> Session:
        """A new session for an agent, whose turns the server remembers as token ids.

            with client.session() as session:
                run_agent(session.base_url, session.api_key)
                samples = session.samples()

        The end of the block ends the session.

        Args:
            metadata: what `Session.read` gives back; JSON of at most 64 KiB.

        Raises:
            InvalidRequest: the metadata is too long, or the server has no run_dir.
            QueueFull: the server has too many sessions, or their file is full.
            TitopoolError: as `generate`.
        """
        return Session(self._run, self._run(lambda client: client.session(metadata)))

    # ---- text and ids ----------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> np.ndarray:
        """int32, [tokens]: a conversation by the model's chat template, with images expanded.

        Raises:
            TitopoolError: as `generate`.
        """
        return self._run(
            lambda client: client.render(
                messages, tools=tools, chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
            )
        )  # fmt: skip

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """int32, [tokens]: the ids of a text.

        Raises:
            TitopoolError: as `generate`.
        """
        return self._run(
            lambda client: client.tokenize(text, add_special_tokens=add_special_tokens)
        )

    def detokenize(self, ids: Any) -> str:
        """The text of token ids, with special tokens.

        Raises:
            TitopoolError: as `generate`.
        """
        return self._run(lambda client: client.detokenize(ids))

    # ---- control ---------------------------------------------------------------------

    @property
    def num_aborts(self) -> int:
        """How often `abort` ended all requests. Rollouts that it ended do not go on."""
        return self._client.num_aborts

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends the requests with these ids with the tokens that they have; None: all requests.

        The requests of a batch with `progress=True` have ids of their own: their batch's id reaches
        them through the client that sent them only.

        Raises:
            TitopoolError: as `generate`.
        """
        self._run(lambda client: client.abort(request_ids))

    def pause(self, mode: str = "keep", *, lease_s: float = 300.0) -> None:
        """Pauses generation for at most `lease_s` seconds, or renews the lease of a pause.

        Args:
            mode: what happens to requests in flight: `keep`, `drain` or `abort`.

        Raises:
            TitopoolError: as `generate`.
        """
        self._run(lambda client: client.pause(mode, lease_s=lease_s))

    def resume(self) -> None:
        """Ends a pause.

        Raises:
            TitopoolError: as `generate`.
        """
        self._run(lambda client: client.resume())

    def scale(self, num_workers: int) -> None:
        """Asks a server that starts its own workers for so many; returns at once.

        Workers that join take jobs once they have loaded and have the pool's weights
        (`wait_until_ready`). Those that leave finish their jobs first.

        Raises:
            InvalidRequest: the host has too few GPUs.
            Conflict: the workers are started by something else.
        """
        self._run(lambda client: client.scale(num_workers))

    def drain(self, worker: str) -> None:
        """Asks a worker to finish its jobs and to end; returns once it takes no more.

        Args:
            worker: its name, as `wait_until_ready` returns it.

        Raises:
            WorkerNotFound: no worker that answers has this name.
        """
        self._run(lambda client: client.drain(worker))

    def info(self) -> ServerInfo:
        """The server's release, model, adapters and weights.

        Raises:
            TitopoolError: as `generate`.
        """
        return self._run(lambda client: client.info())

    def wait_until_ready(
        self,
        timeout_s: float | None = None,
        on_progress: Callable[[tuple[WorkerStatus, ...]], None] | None = None,
        *,
        num_workers: int = 1,
    ) -> tuple[WorkerStatus, ...]:
        """Waits until `num_workers` workers can generate; returns what each worker is doing.

        Args:
            timeout_s: None: the client's.
            on_progress: gets what each worker is doing, whenever that has changed. It runs in a
                thread of the client and must not call the client.

        Raises:
            TimedOut: they could not in time; the message says what each worker is doing.
            IncompatibleServer: the server is of another release.
            InvalidRequest: `timeout_s` is negative or NaN.
        """
        return self._run(
            lambda client: client.wait_until_ready(timeout_s, on_progress, num_workers=num_workers)
        )

    # ---- weights ---------------------------------------------------------------------

    def weights(
        self,
        *,
        device: Any = None,
        host: str | None = None,
        names: Mapping[str, str] | Callable[[str], str] | None = None,
        timeout_s: float = 300.0,
        chunk_bytes: int | None = None,
    ) -> "WeightsClient":
        """The sender of new weights, as a context manager; needs torch.

            with client.weights(device="cuda:0") as weights:
                weights.update(model, policy="keep")

        At the end of the block a pause that it made ends, and its group is closed. An update that
        did not end leaves the old weights in service.

        The arguments are those of `WeightsClient` (`titopool/client/weights_client.py`).

        Raises:
            WeightsError: as `WeightsClient`.
        """
        return self._client.weights(
            device=device, host=host, names=names, timeout_s=timeout_s, chunk_bytes=chunk_bytes
        ).sender

    # ---- the thread ------------------------------------------------------------------

    def _run(self, call: Callable[[AsyncClient], Coroutine[Any, Any, R]]) -> R:
        with _lock:
            if self._is_stopped:
                raise asyncio.CancelledError("the client was stopped")
            if self._thread is None or not self._thread.is_alive:
                # The first call, or the first one after a fork: threads stay behind.
                self._thread = _LoopThread()
            future = self._thread.submit(call(self._client))
        return _result_of(future)


class _LoopThread:
    """An event loop in a thread, which does not keep the process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="titopool-client", daemon=True)
        self._thread.start()
        _threads.add(self)

    def _run(self) -> None:
        # At its end, the runner cancels the calls and closes the sessions.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._end.wait())
        _threads.discard(self)

    @property
    def is_alive(self) -> bool:
        """Whether calls can run: false in a process that was forked later."""
        return self._thread.is_alive()

    def submit(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        """Starts a call."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def end(self) -> None:
        """Lets the thread cancel all calls, close all connections and end; does not wait."""
        # The loop may be closed meanwhile.
        with contextlib.suppress(RuntimeError):
            if self.is_alive:
                self._loop.call_soon_threadsafe(self._end.set)

    def join(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """As `end`, and waits for it."""
        self.end()
        self._thread.join(timeout_s)


# Of all clients, so that no child is forked while a thread holds it.
_lock = threading.RLock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
# Those that run.
_threads: set[_LoopThread] = set()


_is_exiting = threading.Event()


@atexit.register
def _join_all() -> None:
    _is_exiting.set()
    end, running = time.monotonic() + JOIN_TIMEOUT_S, list(_threads)
    for one in running:
        one.end()
    for one in running:
        one.join(max(0.0, end - time.monotonic()))


def _result_of(future: Future[R]) -> R:
    """The result of a call, which has a timeout of its own."""
    try:
        return future.result()
    except CancelledError:
        if _is_exiting.is_set():
            # A daemon thread, which ends with the process and without a traceback.
            raise SystemExit from None
        # No Exception: what goes on after an error must not go on here.
        raise asyncio.CancelledError("the client was closed") from None
    except BaseException:
        # Ctrl-C: closes the connection, so that the server stops the request.
        future.cancel()
        raise
