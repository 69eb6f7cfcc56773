"""What the handlers of one front-end process share: settings, link, tokenizer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flask import current_app

from app.disconnects import DisconnectWatcher
from app.link import Link
from app.tokenizer import TokenizerLoader
from titopool.config import ServerConfig
from titopool.errors import QueueFull
from titopool.sockets import worker_endpoint

RESERVED_THREADS = 64


class Service:
    """Starts with the process that serves, not with the one that forks it."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.link = Link(config, endpoints_of(config))
        self.tokenizer = TokenizerLoader(self.link)
        self.disconnects = DisconnectWatcher()
        # Threads that never wait for a generation answer /health and the like.
        self._num_places = max(1, config.num_threads - RESERVED_THREADS)
        self._places = threading.BoundedSemaphore(self._num_places)

    def start(self) -> None:
        """Starts the threads of this process; does nothing the second time."""
        self.link.start()
        self.tokenizer.start()
        self.disconnects.start()

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the requests that this process holds open at once.

        Raises:
            QueueFull: it holds as many already.
        """
        if not self._places.acquire(blocking=False):
            raise QueueFull(
                f"{self._num_places} requests are open here, as many as num_threads "
                f"({self.config.num_threads}) allows; try again later, or send more prompts in one",
                retry_after_s=1,
            )
        try:
            yield
        finally:
            self._places.release()

    def close(self) -> None:
        """Ends every open request and the threads."""
        self.link.close()
        self.disconnects.close()


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
