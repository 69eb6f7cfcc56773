"""A call: one HTTP request that asks for the model, from its admission to the end of its answer."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import gevent
import numpy as np
from flask import g
from flask import request as http_request
from gevent.event import Event
from msgspec import structs

from app.call.bounds import check_answer_size
from app.call.jobs import (
    Prompt,
    bounds_of_results,
    bytes_of_jobs,
    check_experts,
    distinct_options,
    make_jobs,
)
from app.call.kept_logprobs import arrays_of
from app.call.service import Service, current_service
from app.conversations.turn import SessionTurn
from app.counts.families import SESSION_BRANCHES, UNKNOWN_FIELDS
from app.counts.http_requests import current_record
from app.http.auth import current_key
from app.http.connections import check_client, client_gone, current_client, watching
from app.http.idempotency import current_claim, refuse_stream
from app.http.keys import Key
from app.http.request_bodies import current_reservation
from app.http.request_ids import adopt, make_unique, request_id
from app.http.responses import name_logprobs
from app.inputs.chat_template import Chat, length_of, render_all
from app.inputs.images import check_placeholders
from app.inputs.tokenizer import batches_of, encode_all
from app.pool.request import CountBytes, Request, count_nothing
from app.route.decoding import Body, Decoder, decode_body
from titopool.deadline import Deadline
from titopool.errors import Conflict, DeadlinePassed, InvalidRequest, ModelNotFound
from titopool.settings.sampling import SamplingOptions
from titopool.wire.commands import GetStatus
from titopool.wire.messages import ID_BYTES, ChatParsing, Completed

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
# Characters of a session's id that count, which bounds the time to hash it.
SESSION_LENGTH = 256
# Unknown fields that this process has logged, by route. Clients can make them up.
_unknown: set[tuple[str, str]] = set()
MAX_UNKNOWN = 256
# How often a call whose client has gone looks whether a repeat has come.
CHECK_REPEAT_S = 0.5


class _AllEnded(Exception):
    """Ends a wait for memory that the call no longer needs."""


def name_of(key: Key, request_id: str) -> str:
    """The name under which a request's log-probabilities are kept: another key's request of the same
    id has another name."""
    return f"{key.name}\n{request_id}"


def session_key(session_id: str | None) -> str:
    """What routing uses of a session's id; "" for none."""
    return (session_id or "")[:SESSION_LENGTH]


@contextmanager
def admitted(decoder: Decoder[Body]) -> Iterator[tuple["Call", Body]]:
    """Reads the body of the current HTTP request, admits it as a call, and decodes it.

    Raises:
        TitopoolError: as `app.http.request_bodies.read_body`, and as `Call.__enter__`.
        InvalidRequest: as `decode_body`.
    """
    # Before it takes a place: a client may send slowly.
    sent = http_request.get_data(cache=False)
    with Call(current_service()) as call:
        body = decode_body(sent, decoder)
        del sent
        yield call, body


class Call:
    """Counts against `max_open_requests` and against the front end's memory from `__enter__` on.

    `__exit__` releases all that it took, except where `hand_over` has given that to a response.
    """

    def __init__(self, service: Service):
        """Of the current HTTP request."""
        self._service = service
        self.config, self.link, self.tokenizer = service.config, service.link, service.tokenizer
        self.kept, self.drift, self.templates = service.kept, service.drift, service.templates

    def __enter__(self) -> "Call":
        """
        Raises:
            QueueFull: `max_open_requests` requests are open in this process.
            NoReadyWorker: no worker has reported its model yet.
        """
        service = self._service
        with ExitStack() as at_end:
            service.take_place()
            at_end.callback(service.free_place)
            self.deadline = Deadline.after(self.config.request_timeout_s)
            # The client's id of the request, else one that was made here.
            self.id = request_id()
            # The client's session; "": none. Requests of a session prefer the same worker.
            self.session = session_key(http_request.environ.get("HTTP_X_SESSION_ID"))
            self.key = current_key()
            # The client's connection; None under Flask's test client.
            self.client = current_client()
            # What it has taken of the front end's memory budget.
            self._reservation = current_reservation()
            # For `GET /requests`.
            self._shown = service.requests.begin(self.id, self.key.name)
            # Of the model that it is checked for; workers with another model do not run it.
            self.facts = self.link.facts
            # None outside of `POST /sessions`' sessions.
            self.turn: SessionTurn | None = None
            if (opened := g.get("session")) is not None:
                session, name = opened
                path = http_request.path.rstrip("/")
                self.turn = SessionTurn(service.sessions, session, name, path, self.facts)
            name_logprobs(self.facts.logprobs_mode)
            self._at_end = at_end.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._at_end.close()

    def hand_over(self) -> Callable[[], None]:
        """What releases all instead of `__exit__`: a streamed response calls it at its end."""
        return self._at_end.pop_all().close

    def identify(self, request_id: str | None, session_id: str | None) -> None:
        """Takes the ids of a body: a header's request id wins over the body's, the body's session over
        a header's."""
        name = adopt(request_id)
        # In a session an id means one request, though agents that are alike send the same.
        self._shown.id = self.id = make_unique() if self.turn else name
        self.session = session_key(session_id) or self.session

    # ---- while the body is checked -----------------------------------------------------

    def accept_unknown(self, names: Sequence[str]) -> None:
        """Counts fields of a body that this server does not know, and logs each name once."""
        counts, route = self._service.counts, str(http_request.url_rule).rstrip("/")
        if names and counts is not None:
            counts.values(UNKNOWN_FIELDS, route)[0] += len(names)
        for name in names:
            if len(_unknown) < MAX_UNKNOWN and (seen := (route, name[:64])) not in _unknown:
                _unknown.add(seen)
                logger.warning("%s: the field %r is not known here, and has no effect", *seen)

    def check_num_completions(self, num_prompts: int, n: int, field: str) -> None:
        """Refuses more completions than `max_completions_per_request`; `field` has the prompts."""
        limit = self.config.max_completions_per_request
        if num_prompts * n > limit:
            raise InvalidRequest(
                f"{field}: expected at most {limit} completions in a request "
                f"(max_completions_per_request), got {num_prompts} prompts times n = {n}; send several "
                "requests",
                param=field,
            )

    def use_tokenizer(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        size: int = 0,
        is_short: bool = False,
    ) -> Result:
        """Runs `function(tokenizer, *arguments)` in the tokenizer's thread.

        Args:
            size, is_short: as of `TokenizerLoader.use`.

        Raises:
            TitopoolError: as `TokenizerLoader.use`.
        """
        return self.tokenizer.use(
            function, *arguments,
            facts=self.facts, timeout_s=self.deadline.left_s, size=size, is_short=is_short,
            client=self.client,
        )  # fmt: skip

    def encode(
        self,
        texts: Sequence[str],
        locations: Sequence[str],
        *,
        with_special_tokens: bool = True,
        is_truncated: bool = False,
    ) -> list[list[int]]:
        """The token ids of each text, as `encode_all`; long lists in several turns."""
        ids = []
        for batch, size in batches_of([len(text) for text in texts]):
            ids += self.use_tokenizer(
                encode_all, texts[batch], locations[batch], self.facts.max_model_len,
                with_special_tokens, is_truncated, size=size,
            )  # fmt: skip
        return ids

    def render(self, chats: Sequence[Chat], *, is_truncated: bool = False) -> list[list[int]]:
        """The token ids of each conversation, as `render_all`; long lists in several turns.

        Raises:
            TitopoolError: as `render_all`, and as `RequestTemplates.rendered`.
        """
        chats = [self.templates.rendered(one, self.facts, self.deadline.left_s) for one in chats]
        ids = []
        for batch, size in batches_of([length_of(chat) for chat in chats]):
            ids += self.use_tokenizer(
                render_all, chats[batch], self.facts.max_model_len, is_truncated, size=size
            )
        return ids

    def adapter_named(self, name: str | None, param: str = "model") -> str:
        """The LoRA adapter that a body requests by `name`; "" for the base model.

        Raises:
            ModelNotFound: neither the model nor an adapter has this name.
        """
        if name is None or name == self.facts.model:
            return ""
        if name not in self.link.adapters and self.facts.max_loras:
            # Another front end may have just loaded it. Each worker sends its adapters before it
            # answers GetStatus.
            commands = self.link.commands
            commands.gather_outcomes(commands.reachable_workers(), GetStatus())
        if name not in self.link.adapters:
            names = ", ".join(map(repr, [self.facts.model, *sorted(self.link.adapters)]))
            raise ModelNotFound(f"{param}: expected {names}, got {name!r}", param=param)
        return name

    # ---- its jobs ----------------------------------------------------------------------

    def make_request(
        self,
        prompts: Sequence[Prompt],
        options: SamplingOptions,
        *,
        is_streamed: bool = False,
        adapter: str = "",
        chat: ChatParsing | None = None,
        min_weight_version: int | None = None,
    ) -> Request:
        """A request with one job for each prompt, not yet submitted.

        Args:
            adapter: the name of a LoRA adapter; "" for the base model.
            chat: what vLLM's parsers need; None: the text is not parsed.
            min_weight_version: wait until the pool serves this version or a later one.

        Raises:
            TitopoolError: there are too many prompts, images do not fit one, no worker is ready, or
                the pool did not serve the version before the call's deadline.
        """
        if is_streamed:
            refuse_stream()
        if self.turn is not None:
            self._at_end.callback(self.turn.begin(self.id, adapter, options))
        link, facts, limit = self.link, self.facts, self.config.memory_budget_bytes
        link.check_num_prompts(len(prompts))
        locations = [prompt.location for prompt in prompts]
        check_placeholders(
            [prompt.token_ids for prompt in prompts], [prompt.images for prompt in prompts],
            locations, facts.images,
        )  # fmt: skip
        for one in distinct_options(prompts, options).values():
            check_answer_size(one, facts, limit)
        if not is_streamed:
            check_experts(prompts, options, facts, limit)
        jobs = make_jobs(
            prompts, options, facts,
            with_prefixes=link.needs_prefixes,
            is_streamed=is_streamed,
            adapter=adapter,
            chat=chat,
            client_id=self.id,
            key_name=self.key.name,
            traceparent=self._shown.traceparent,
        )  # fmt: skip
        if self._reservation is not None:
            self._reservation.keep(self._reservation.num_body_bytes + bytes_of_jobs(jobs))
        if min_weight_version is not None:
            self._wait_for_version(min_weight_version)
        link.check_ready()
        return Request(
            jobs, locations,
            facts=facts, session=self.turn.routing if self.turn else self.session, weight=self.key.weight,
            count_bytes=self.count_results,
            # A stream holds what its client has not read yet.
            bounds=[] if is_streamed else bounds_of_results(prompts, options, facts),
        )  # fmt: skip

    @property
    def count_results(self) -> CountBytes:
        """Counts the memory of results.

        It refers to the reservation only. The call and `app.pool.request.Request`, which keeps it,
        would be a cycle, and the request's jobs would stay until garbage is collected.
        """
        if self._reservation is None:
            return count_nothing
        return self._reservation.receive

    def hold(self, num_bytes: int) -> None:
        """Counts what a stream keeps until its end; it is never refused for that."""
        if self._reservation is not None:
            self._reservation.add(num_bytes)

    def run(self, request: Request) -> list[Completed]:
        """Runs the jobs of a request at the workers and returns their results, in order.

        Raises:
            TitopoolError: why the request failed.
        """
        self._expect_results(request)
        with self.submitted(request):
            if not request.wait(self.deadline.left_s):
                self._cancel_overdue(request)
        results = request.take_results()
        if self._reservation is not None:
            self._reservation.settle()
        if self.kept.is_on:
            self.keep_logprobs(arrays_of(results))
        if self.turn is not None:
            for result in results:
                self.hold(self.turn.take(result))
            self.keep_turn()
        return results

    def render_images(self, request: Request) -> list[Completed]:
        """Expands the placeholders of images at a worker, which needs the model's processor, and samples
        nothing.

        Raises:
            TitopoolError: as `run`.
        """
        request.jobs = [
            structs.replace(
                job,
                num_sequences=0,
                num_tokens=len(job.prompt_token_ids) // ID_BYTES,
                prefix=None,
                is_streamed=False,
            )
            for job in request.jobs
        ]
        request.bounds = [0] * len(request.jobs)
        return self.run(request)

    def wait_for_progress(self, request: Request) -> None:
        """Waits for chunks of a streamed request or its end; cancels it at the deadline."""
        if not request.wait_for_progress(self.deadline.left_s):
            self._cancel_overdue(request)

    def keep_logprobs(self, arrays: Sequence[np.ndarray]) -> None:
        """Keeps log-probabilities for `POST /mismatch`, float32 [tokens] of each completion."""
        self.kept.keep(name_of(self.key, self.id), arrays)

    def keep_turn(self) -> None:
        """Keeps what was sampled in the request's session, if it has one.

        Raises:
            TitopoolError: as `SessionTurn.keep`.
        """
        if self.turn is None:
            return
        for reason in self.turn.keep():
            if reason and self._service.counts is not None:
                self._service.counts.values(SESSION_BRANCHES, reason)[0] += 1

    @contextmanager
    def submitted(self, request: Request) -> Iterator[None]:
        """Submits `request`; within the block, a client that hangs up cancels it.

        With an Idempotency-Key the request goes on for as long as a repeat may come.
        """
        claim, record, link = current_claim(), current_record(), self.link
        if record is not None:
            record.generation = request

        def on_client_gone() -> None:
            if claim is not None and not claim.has_ended:
                claim.touch()
            while claim is not None and not claim.has_ended and claim.is_awaited():
                gevent.sleep(CHECK_REPEAT_S)
            link.cancel(request, client_gone())

        with watching(self.client, on_client_gone):
            self._shown.submit(request)
            link.submit(request, aborted=self._shown.ended_ids)
            yield

    def _expect_results(self, request: Request) -> None:
        """Waits for room for the results of `request`, or until a client has ended all of its jobs.

        Raises:
            TitopoolError: as `Reservation.wait_for`.
        """
        shown, bounds, client = self._shown, request.bounds, self.client
        shown.hold(request)

        def check() -> None:
            check_client(client)
            if shown.has_ended:
                raise _AllEnded

        if self._reservation is None:
            return
        # A result is there twice while it is taken out of its message.
        most = sum(bounds) + max(bounds, default=0)
        # If all have ended, they end without a token, which needs no room.
        with suppress(_AllEnded):
            check()
            self._reservation.expect(
                most, self.deadline.left_s, check, partial(self.link.fail, request)
            )

    def _cancel_overdue(self, request: Request) -> None:
        self.link.cancel(
            request,
            DeadlinePassed(
                f"the request did not end within {self.config.request_timeout_s:g} s "
                "(request_timeout_s); ask for fewer tokens in one request, or raise request_timeout_s"
            ),
        )

    def _wait_for_version(self, version: int) -> None:
        """Waits until the pool serves `version` or a later one.

        Raises:
            Conflict: it did not before the deadline; or it went back to an earlier version.
            ClientGone: the client closed its connection.
        """
        left, shown, link = Event(), self._shown, self.link
        shown.on_abort = left.set
        latest = link.weights.version
        with watching(self.client, left.set):
            while (current := link.weights.version) < version:
                if current < latest:
                    raise Conflict(
                        f"min_weight_version: expected that the pool goes on from version {latest} to "
                        f"{version}, but it went back to version {current}, as a trainer does that starts "
                        "again from an earlier checkpoint; ask for a version of its new run"
                    )
                latest = current
                if self.deadline.has_passed:
                    raise Conflict(
                        f"min_weight_version: expected that the pool serves version {version} within "
                        f"{self.config.request_timeout_s:g} s (request_timeout_s), but it serves "
                        f"version {current}; ask for a lower one, or send the "
                        "request again after the update"
                    )
                link.wait_for_weights(left, self.deadline.left_s)
                if shown.is_aborted:
                    # Its jobs end without a token.
                    return
                if left.is_set():
                    raise client_gone()
