"""What the handlers of one front-end process share: settings, link, tokenizer, drift."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flask import current_app
from gevent.monkey import is_module_patched

from app.inputs.admission import Admission
from app.inputs.drift import DriftWatch
from app.inputs.tokenizer import TokenizerLoader
from app.pool.link import Link
from titopool.deadline import Deadline
from titopool.errors import ConfigError, QueueFull
from titopool.settings.config import ServerConfig
from titopool.wire.sockets import worker_endpoint


class Service:
    """Starts with the process that serves, not with the one that forks it."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.link = Link(config, endpoints_of(config))
        self.tokenizer = TokenizerLoader()
        self.drift = DriftWatch(self.link, self.tokenizer)
        self._num_open = 0

    def start(self) -> None:
        """Connects to the workers; does nothing the second time.

        Raises:
            ConfigError: this process serves with threads or one request at a time.
        """
        if not is_module_patched("socket"):
            raise ConfigError(
                "expected gunicorn's gevent worker; start `titopool serve`, or gunicorn with "
                "`-c python:app.gunicorn_hooks`"
            )
        self.link.start()

    @contextmanager
    def admit(self) -> Iterator["Admitted"]:
        """Takes on a request, as one of those that this process holds open at once.

        Raises:
            QueueFull: it holds as many already.
            NoReadyWorker: no worker has told yet which model it serves.
        """
        limit = self.config.max_open_requests
        if self._num_open >= limit:
            raise QueueFull(
                f"{limit} requests are open here, as many as max_open_requests allows; try again "
                "later, or send more prompts in one",
                retry_after_s=1,
            )
        self._num_open += 1
        try:
            deadline = Deadline.after(self.config.request_timeout_s)
            yield Admitted(self.tokenizer, self.link.facts, deadline, self)
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """Ends every open request and the connections."""
        self.link.close()


@dataclass(frozen=True)
class Admitted(Admission):
    """The same, with what sends it on."""

    service: Service


def endpoints_of(config: ServerConfig) -> tuple[str, ...]:
    """The workers' endpoints: those configured, else the local pool's sockets."""
    if config.endpoints or not config.run_dir:
        return config.endpoints
    return tuple(worker_endpoint(config.run_dir, index) for index in range(config.num_workers))


def current_service() -> Service:
    """The service of the application that handles this request; starts it if need be."""
    service: Service = current_app.extensions["titopool"]
    service.start()
    return service
