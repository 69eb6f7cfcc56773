"""What all handlers of a front end share: settings, link, tokenizer, drift watch."""

from collections import Counter
from pathlib import Path

from flask import current_app
from gevent.monkey import is_module_patched

from app.call.kept_logprobs import KeptLogprobs
from app.call.open_requests import InFlight, OpenRequests
from app.conversations.store import SessionStore
from app.counts.front_end import FrontEndCounts
from app.draining import Draining
from app.http.budget import Budget
from app.inputs.chat_template import template_of_file
from app.inputs.drift import DriftWatch
from app.inputs.request_templates import RequestTemplates
from app.inputs.tokenizer import TokenizerLoader
from app.pool.link import Link
from titopool.errors import ConfigError, QueueFull
from titopool.settings.config import ServerConfig
from titopool.tracing import Traces
from titopool.wire.messages import FrontEndTotals
from titopool.wire.run_dir import SESSIONS, endpoints_file


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
        self.tokenizer = TokenizerLoader(template_of_file(config.chat_template))
        self.templates = RequestTemplates(config.trust_request_chat_template)
        self.drift = DriftWatch(self.link, self.tokenizer, self.templates)
        self.kept = KeptLogprobs(config)
        self.sessions = SessionStore(
            Path(config.run_dir, SESSIONS) if config.run_dir else None,
            max_bytes=config.session_bytes,
            max_sessions=config.max_sessions,
            keep_s=config.session_timeout_s,
        )
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

    def take_place(self) -> None:
        """Counts one more open request, until `free_place`.

        Raises:
            QueueFull: `max_open_requests` requests are open in this process.
        """
        limit = self.config.max_open_requests
        if self._num_open >= limit:
            raise QueueFull(
                f"expected at most {limit} open requests in this process (max_open_requests), got "
                "one more; retry later, or send more prompts in one request",
                retry_after_s=1,
            )
        self._num_open += 1

    def free_place(self) -> None:
        """A request that took a place has ended."""
        self._num_open -= 1

    def _totals(self) -> FrontEndTotals:
        return FrontEndTotals(
            memory_taken=self.budget.taken,
            memory_limit=self.budget.limit,
            num_waiting=self.link.num_waiting + self.requests.num_held,
            refused=dict(self.refused),
        )

    def close(self) -> None:
        """Fails every open request and closes the connections to the workers."""
        self.link.close()
        self.templates.close()


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
