"""What all handlers of a front end share: settings, link, tokenizer, drift watch."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from flask import current_app
from flask import request as http_request
from gevent.monkey import is_module_patched

from app.call.admission import Admission, session_key
from app.call.kept_logprobs import KeptLogprobs
from app.call.open_requests import InFlight, OpenRequests
from app.counts.front_end import FrontEndCounts
from app.draining import Draining
from app.http.auth import current_key
from app.http.budget import Budget
from app.http.connections import current_client
from app.http.request_bodies import current_reservation
from app.http.request_ids import request_id
from app.http.responses import name_logprobs
from app.inputs.drift import DriftWatch
from app.inputs.tokenizer import TokenizerLoader
from app.pool.link import Link
from app.route.decoding import Body, Decoder, decode_body
from titopool.deadline import Deadline
from titopool.errors import ConfigError, QueueFull
from titopool.settings.config import ServerConfig
from titopool.tracing import Traces
from titopool.wire.messages import FrontEndTotals
from titopool.wire.pool_files import endpoints_file


class Service:
    """One for each Flask application. `start` connects it to the workers."""

    def __init__(self, config: ServerConfig):
        self.config = config
        # Answers with an error of this process, by the error's code, and answers that nobody read.
        self.refused: Counter[str] = Counter()
        self.budget = Budget(
            config.memory_budget_bytes, lambda: self.refused.update(["answer_unread"])
        )
        # None: the setting `metrics` is off.
        self.counts = FrontEndCounts(config.run_dir) if config.metrics else None
        self.requests = OpenRequests()
        self.link = Link(config, endpoints_of(config), self._totals, self.counts, self.requests)
        self.requests.find = lambda pending: InFlight(*self.link.where_is(pending))
        self.tokenizer = TokenizerLoader()
        self.drift = DriftWatch(self.link, self.tokenizer)
        self.kept = KeptLogprobs(config)
        self._num_open = 0
        # None without the setting `otlp_endpoint`.
        self.traces: Traces | None = None
        # None outside of gunicorn.
        self.draining: Draining | None = None

    @property
    def is_draining(self) -> bool:
        """Whether this front end only finishes what is open."""
        return self.draining is not None and self.draining.has_begun

    def start(self) -> None:
        """Connects to the workers; further calls do nothing.

        Raises:
            ConfigError: this process does not run under gunicorn's gevent worker.
        """
        if not is_module_patched("socket"):
            raise ConfigError(
                "expected gunicorn's gevent worker, got another; start `titopool serve`, or "
                "gunicorn with `-c python:app.gunicorn_hooks`"
            )
        self.link.start()

    @contextmanager
    def admit(self, decoder: Decoder[Body]) -> Iterator[tuple[Admission, Body]]:
        """Reads the body of the current HTTP request, admits it, sets its deadline and decodes it.

        Raises:
            TitopoolError: as `app.http.request_bodies.read_body`.
            QueueFull: `max_open_requests` requests are open in this process.
            NoReadyWorker: no worker has reported its model yet.
            InvalidRequest: as `decode_body`.
        """
        # Before it takes a place: a client may send slowly.
        sent = http_request.get_data(cache=False)
        limit = self.config.max_open_requests
        if self._num_open >= limit:
            raise QueueFull(
                f"expected at most {limit} open requests in this process (max_open_requests), got "
                "one more; retry later, or send more prompts in one request",
                retry_after_s=1,
            )
        with ExitStack() as at_end:
            self._num_open += 1
            at_end.callback(self._count_end)
            shown = self.requests.begin(request_id(), current_key().name)
            deadline = Deadline.after(self.config.request_timeout_s)
            admission = Admission(
                self.config, self.link, self.tokenizer, self.link.facts, deadline, at_end,
                request_id(), session_key(http_request.headers.get("X-Session-ID")),
                current_client(), current_reservation(), current_key(),
                self.kept.keep if self.kept.is_on else None, shown,
            )  # fmt: skip
            name_logprobs(admission.facts.logprobs_mode)
            body = decode_body(sent, decoder)
            del sent
            yield admission, body

    def _totals(self) -> FrontEndTotals:
        return FrontEndTotals(
            memory_taken=self.budget.taken,
            memory_limit=self.budget.limit,
            num_waiting=self.link.num_waiting + self.requests.num_held,
            refused=dict(self.refused),
        )

    def _count_end(self) -> None:
        self._num_open -= 1

    def close(self) -> None:
        """Fails every open request and closes the connections to the workers."""
        self.link.close()


def endpoints_of(config: ServerConfig) -> tuple[str, ...]:
    """The configured endpoints, else those of the workers that this server starts."""
    if config.endpoints or not config.run_dir:
        return config.endpoints
    return (endpoints_file(config.run_dir),)


def current_service() -> Service:
    """The service of the current Flask application, started."""
    service: Service = current_app.extensions["titopool"]
    service.start()
    return service
