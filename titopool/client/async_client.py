"""The client for asyncio. `Client` (`titopool/client/sync_client.py`) runs it in a thread.

Runs in: trainers and agents. One HTTP session for each event loop that uses it. Every call ends
within its timeout, and a call that is cancelled closes its connection, which stops its generation.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import aiohttp
import numpy as np

from titopool.answers.generation import DetokenizeAnswer, Render, TokenizeAnswer
from titopool.answers.sessions import SessionMade
from titopool.client import answers, bodies
from titopool.client.agent_sessions import AsyncSession, body_of
from titopool.client.answers import Answer, checked
from titopool.client.bodies import Batch, Options
from titopool.client.failures import (
    ConnectionLost,
    IncompatibleServer,
    TimedOut,
    UnexpectedAnswer,
    no_server,
)
from titopool.client.results import PromptResult, Score, ServerInfo, WorkerStatus
from titopool.client.sessions import Sessions
from titopool.client.tracing import trace_headers
from titopool.errors import InvalidRequest, TitopoolError
from titopool.release import RELEASE

if TYPE_CHECKING:
    from titopool.client.async_weights import AsyncWeightsClient

# Requests of a batch that shows its progress.
MAX_PIECES = 64
# Seconds between tries of a request with a key, and between looks at /ready.
FIRST_DELAY_S, MAX_DELAY_S = 0.2, 5.0
POLL_S, POLL_TIMEOUT_S = 0.5, 10.0
REPEATED_STATUSES = (429, 503)


class AsyncClient:
    """One server's client. Calls may run at once.

    Every call raises the server's error by its code (`titopool/errors.py`), or an error of
    `titopool/client/failures.py`; all are `TitopoolError`s.
    """

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
        if not base_url.startswith(("http://", "https://")) or not timeout_s > 0:
            raise InvalidRequest(
                "base_url, timeout_s: expected http://host:port and a positive number, got "
                f"{base_url!r} and {timeout_s!r}"
            )
        self.base_url = base_url.rstrip("/")
        self.api_key, self.admin_key = api_key, admin_key or api_key
        self.timeout_s = timeout_s
        # How often `abort` ended all requests: what they sampled does not go on then.
        self.num_aborts = 0
        self._sessions = Sessions()
        # (id, id of a part) of the requests in flight of batches that show their progress.
        self._parts: list[tuple[str | None, str | None]] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, has the settings and keys, and connections of its own."""
        return {**vars(self), "_sessions": None, "_parts": []}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _sessions=Sessions())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections; the next call opens new ones."""
        await self._sessions.close()

    # ---- generation ------------------------------------------------------------------

    async def generate(
        self,
        /,
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
        options = Options(
            n, max_tokens, temperature, logprobs, lora_name, min_weight_version, sampling
        )
        batch = bodies.prompts_batch(prompts, images, options)
        return await self._run(batch, request_id, session_id, idempotent, progress)

    async def chat(
        self,
        /,
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
        options = Options(
            n, max_tokens, temperature, logprobs, lora_name, min_weight_version, sampling
        )
        batch = bodies.chats_batch(conversations, tools, chat_template_kwargs, options)
        return await self._run(batch, request_id, session_id, idempotent, progress)

    async def _run(
        self,
        batch: Batch,
        request_id: str | None,
        session_id: str | None,
        idempotent: bool | str,
        progress: bool,
    ) -> list[PromptResult]:
        key = (
            (idempotent if isinstance(idempotent, str) else uuid.uuid4().hex)
            if idempotent
            else None
        )
        headers = {"Accept": answers.MSGPACK, **bodies.headers_of(request_id, session_id, key)}
        if not progress:
            return await self._run_piece(batch, 0, len(batch), headers)
        bar = _progress_bar(len(batch))

        async def run_shown(start: int, stop: int) -> list[PromptResult]:
            # What the server keeps by an id, as for POST /mismatch, is one request's.
            own_id, own_key = (one and f"{one}-{start}" for one in (request_id, key))
            own = {**headers, **bodies.headers_of(own_id, None, own_key)}
            self._parts.append((request_id, own_id))
            try:
                found = await self._run_piece(batch, start, stop, own)
            finally:
                self._parts.remove((request_id, own_id))
            bar.update(stop - start)
            return found

        tasks = [
            asyncio.create_task(run_shown(*piece))
            for piece in bodies.pieces(len(batch), MAX_PIECES)
        ]
        try:
            return [one for part in await asyncio.gather(*tasks) for one in part]
        finally:
            for task in tasks:
                task.cancel()
            bar.close()

    async def _run_piece(
        self, batch: Batch, start: int, stop: int, headers: Mapping[str, str]
    ) -> list[PromptResult]:
        try:
            answer = await self._call(batch.path, batch.body(start, stop), headers=headers)
        except TitopoolError as error:
            error.message = batch.moved(error.message, start)
            error.args = (error.message,)
            raise
        return answers.token_results(answer, batch.sent_ids(start, stop), batch.options.n)

    async def score(
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
        body = bodies.json_body(
            {
                "sequences": [bodies.ids_list(one) for one in sequences],
                "prompt_lengths": list(prompt_lengths),
                "top_logprobs": top_logprobs,
                "min_weight_version": min_weight_version,
                "response_format": "binary",
            }
        )
        headers = bodies.headers_of(request_id, None, None)
        return answers.scores(await self._call("/get_sequence_logprobs/", body, headers=headers))

    # ---- agents ----------------------------------------------------------------------

    async def session(self, metadata: Mapping[str, Any] | None = None) -> AsyncSession:
        """As `Client.session`: `async with await client.session() as session`."""
        made = answers.json_answer(await self._call("/sessions", body_of(metadata)), SessionMade)
        return AsyncSession(self._call, self.base_url, made)

    # ---- text and ids ----------------------------------------------------------------

    async def render(
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
        encoded = bodies.messages_of(messages)
        fields = {
            "messages": encoded,
            "add_generation_prompt": add_generation_prompt,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
            **({"tools": tools} if tools else {}),
        }
        if not bodies.has_images(encoded):
            answer = await self._call("/tokenize", bodies.json_body(fields))
            return answers.int32(answers.json_answer(answer, TokenizeAnswer).tokens)
        # Only this route expands the placeholders of images. It parses no tool calls.
        no_parser = {"tool_choice": "none"} if tools else {}
        body = bodies.json_body({**fields, **no_parser})
        answer = await self._call("/v1/chat/completions/render", body)
        return answers.int32(answers.json_answer(answer, Render).token_ids)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """int32, [tokens]: the ids of a text.

        Raises:
            TitopoolError: as `generate`.
        """
        body = bodies.json_body({"prompt": text, "add_special_tokens": add_special_tokens})
        answer = await self._call("/tokenize", body)
        return answers.int32(answers.json_answer(answer, TokenizeAnswer).tokens)

    async def detokenize(self, ids: Any) -> str:
        """The text of token ids, with special tokens.

        Raises:
            TitopoolError: as `generate`.
        """
        body = bodies.json_body({"tokens": bodies.ids_list(ids)})
        answer = await self._call("/detokenize", body)
        return answers.json_answer(answer, DetokenizeAnswer).prompt

    # ---- control ---------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends the requests with these ids with the tokens that they have; None: all requests.

        The requests of a batch with `progress=True` have ids of their own: their batch's id reaches
        them through the client that sent them only.

        Raises:
            TitopoolError: as `generate`.
        """
        if request_ids is None:
            self.num_aborts += 1
            await self._call("/abort_requests", b"{}", key=self.admin_key)
        else:
            whole = list(request_ids)
            parts = [part for of, part in list(self._parts) if of in whole]
            body = bodies.json_body({"request_ids": whole + parts})
            await self._call("/inference/v1/abort_requests", body)

    async def pause(self, mode: str = "keep", *, lease_s: float = 300.0) -> None:
        """Pauses generation for at most `lease_s` seconds, or renews the lease of a pause.

        Args:
            mode: what happens to requests in flight: `keep`, `drain` or `abort`.

        Raises:
            TitopoolError: as `generate`.
        """
        body = bodies.json_body({"mode": mode, "lease_s": lease_s})
        await self._call("/pause", body, key=self.admin_key)

    async def resume(self) -> None:
        """Ends a pause.

        Raises:
            TitopoolError: as `generate`.
        """
        await self._call("/resume", b"{}", key=self.admin_key)

    async def scale(self, num_workers: int) -> None:
        """Asks a server that starts its own workers for so many; returns at once.

        Workers that join take jobs once they have loaded and have the pool's weights
        (`wait_until_ready`). Those that leave finish their jobs first.

        Raises:
            InvalidRequest: the host has too few GPUs.
            Conflict: the workers are started by something else.
        """
        body = bodies.json_body({"num_workers": num_workers})
        await self._call("/workers/scale", body, key=self.admin_key, statuses=(202,))

    async def drain(self, worker: str) -> None:
        """Asks a worker to finish its jobs and to end; returns once it takes no more.

        Args:
            worker: its name, as `wait_until_ready` returns it.

        Raises:
            WorkerNotFound: no worker that answers has this name.
        """
        path = f"/workers/{quote(worker, safe='')}/drain"
        await self._call(path, b"{}", key=self.admin_key, statuses=(202,))

    async def info(self) -> ServerInfo:
        """The server's release, model, adapters and weights.

        Raises:
            TitopoolError: as `generate`.
        """
        models = await self._call("/v1/models")
        label = await self._call("/weight_info", key=self.admin_key)
        return answers.info_of(models, label)

    async def wait_until_ready(
        self,
        timeout_s: float | None = None,
        on_progress: Callable[[tuple[WorkerStatus, ...]], None] | None = None,
        *,
        num_workers: int = 1,
    ) -> tuple[WorkerStatus, ...]:
        """Waits until `num_workers` workers can generate; returns what each worker is doing.

        Args:
            timeout_s: None: the client's.
            on_progress: gets what each worker is doing, whenever that has changed. It runs in the
                event loop, which `Client` has in a thread of its own, and must not block it.

        Raises:
            TimedOut: they could not in time; the message says what each worker is doing.
            IncompatibleServer: the server is of another release.
            InvalidRequest: `timeout_s` is negative or NaN.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if not timeout_s >= 0:
            raise InvalidRequest(f"timeout_s: expected at least 0, got {timeout_s!r}")
        deadline = asyncio.get_running_loop().time() + timeout_s
        shown: tuple[WorkerStatus, ...] | None = None
        while True:
            found, why = await self._workers(deadline)
            if found is not None and found != shown:
                shown = found
                if on_progress is not None:
                    on_progress(found)
            if found and sum(one.phase == "ready" for one in found) >= num_workers:
                return found
            if asyncio.get_running_loop().time() + POLL_S > deadline:
                raise TimedOut(
                    f"{self.base_url}: expected {num_workers} ready workers within {timeout_s:g} s, "
                    f"got {why}; see the server's log, or wait longer"
                )
            await asyncio.sleep(POLL_S)

    async def _workers(self, deadline: float) -> tuple[tuple[WorkerStatus, ...] | None, str]:
        """What the workers are doing (None: the server does not answer), and the same in words."""
        left_s = max(0.1, deadline - asyncio.get_running_loop().time())
        try:
            answer = await self._call(
                "/ready", statuses=(200, 503), timeout_s=min(POLL_TIMEOUT_S, left_s)
            )
            workers = answers.workers_of(answer)
        except IncompatibleServer:
            raise
        except (ConnectionLost, TimedOut, UnexpectedAnswer) as error:
            return None, str(error)
        return workers, ", ".join(map(str, workers)) or "no workers"

    # ---- weights ---------------------------------------------------------------------

    def weights(
        self,
        *,
        device: Any = None,
        host: str | None = None,
        names: Mapping[str, str] | Callable[[str], str] | None = None,
        timeout_s: float = 300.0,
        chunk_bytes: int | None = None,
    ) -> "AsyncWeightsClient":
        """As `Client.weights`, for `async with` and calls to await."""
        from titopool.client.async_weights import AsyncWeightsClient
        from titopool.client.weights_client import WeightsClient
        from titopool.wire.weight_plan import DEFAULT_CHUNK_BYTES

        sender = WeightsClient(
            self.base_url, api_key=self.admin_key, device=device, host=host, names=names,
            timeout_s=timeout_s,
            chunk_bytes=DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
        )  # fmt: skip
        return AsyncWeightsClient(sender)

    # ---- calls -----------------------------------------------------------------------

    async def _call(
        self,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        method: str | None = None,
        statuses: Sequence[int] = (200,),
        timeout_s: float | None = None,
    ) -> Answer:
        """The answer to a request; repeats what has a key.

        Args:
            method: None: POST with a body, GET without one.

        Raises:
            TitopoolError: the server's error, or why there is none.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        bearer = self.api_key if key is None else key
        method = method or ("GET" if body is None else "POST")
        sent = {"User-Agent": f"titopool/{RELEASE}", **trace_headers(), **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        if bearer:
            sent["Authorization"] = f"Bearer {bearer}"
        last: TitopoolError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                delay_s = FIRST_DELAY_S
                while True:
                    try:
                        return checked(
                            await self._once(method, path, body, sent), statuses=statuses
                        )
                    except TitopoolError as error:
                        if "Idempotency-Key" not in sent or not _may_repeat(error):
                            raise
                        last = error
                    await asyncio.sleep(last.retry_after_s or delay_s)
                    delay_s = min(2 * delay_s, MAX_DELAY_S)
        except TimeoutError:
            why = f" (the last try: {last})" if last else ""
            raise TimedOut(
                f"{self.base_url}{path}: expected an answer within {timeout_s:g} s (timeout_s), got "
                f"none{why}; ask for fewer tokens in one request, or raise timeout_s"
            ) from last

    async def _once(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        url = self.base_url + path
        try:
            session = await self._sessions.get()
            async with session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                content = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise ConnectionLost(
                no_server(self.base_url, _cause_of(error), "check the URL")
            ) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise
            raise ConnectionLost(
                f"{url}: expected an answer, but the connection failed: {type(error).__name__}: "
                f"{error}; check that the server runs"
            ) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise UnexpectedAnswer(
                f"{url}: expected titopool's answer over HTTP, got another: {error}; check the URL"
            ) from error
        found = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, found, content, url)


def _cause_of(error: aiohttp.ClientConnectorError) -> BaseException:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    return error.os_error


def _may_repeat(error: TitopoolError) -> bool:
    """Whether a request with a key may be sent again after `error`."""
    if isinstance(error, ConnectionLost):
        return True
    return error.status in REPEATED_STATUSES and error.retry_after_s is not None


def _progress_bar(total: int) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress=True: expected tqdm, got none; pip install tqdm") from None
    return tqdm(total=total, unit="prompt")
