"""One model's bytes, given to other workers and taken from another one.

Runs in: vLLM's processes that hold the model, on the model's thread, between two steps.
"""

import socket
from typing import Any

from workers.in_model.checkpoint_files import Refused
from workers.in_model.peers.fetch import Fetch
from workers.in_model.peers.model_bytes import ModelBytes, opaque_weights
from workers.in_model.peers.offer import Offer
from workers.in_model.served_model import ServedModel


class Exchange:
    """At most one offer to other workers, and at most one fetch from another worker."""

    def __init__(self, model: ServedModel):
        self._model = model
        self._offer: Offer | None = None
        self._fetch: Fetch | None = None

    def offer(self, address: str, port: int, idle_s: float) -> dict[str, Any]:
        """Gives this process's part of the model to other workers, until it changes.

        Args:
            address, port: where to listen; the processes have ports in a row, 0 is any free one.
            idle_s: ends after this time without a reader.

        Returns:
            What a reader needs; `host` tells whether all processes are on one host.

        Raises:
            Refused: vLLM's form of the weights cannot be copied, or the address is taken.
        """
        if self._model.moves_experts:
            raise Refused("vLLM moves its experts between processes (--enable-eplb)")
        if opaque := self._opaque:
            raise Refused(
                f"vLLM has packed {len(opaque)} of its layers into memory that cannot be copied, as it "
                f"does on a CPU; the first is {opaque[0]}"
            )
        offer = self._offer
        if offer is None or not offer.renew():
            self.end_offer()
            try:
                self._offer = offer = Offer(
                    self._bytes, self._model.device,
                    address=address, port=port + self._model.rank if port else 0, idle_s=idle_s,
                )  # fmt: skip
            except OSError as error:
                raise Refused(str(error)) from None
        return {"port": offer.port, "key": offer.key, "host": socket.gethostname()}

    def end_offer(self) -> None:
        """Before the model changes: readers learn that it does."""
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.end()

    def compare(self, peers: list[tuple[str, str]], timeout_s: float) -> None:
        """Connects to another worker's process of the same rank, and compares the models.

        Args:
            peers: (address, key) of each rank.

        Raises:
            Refused: the models differ, or the other process does not answer.
        """
        if opaque := self._opaque:
            raise Refused(f"this worker has packed weights, such as {opaque[0]}")
        if len(peers) <= self._model.rank:
            raise Refused(f"expected a peer of rank {self._model.rank}, got {len(peers)} peers")
        self.end_fetch()
        self._fetch = Fetch(*peers[self._model.rank])
        self._fetch.compare(self._bytes, timeout_s)

    def fetch(self, timeout_s: float) -> dict[str, Any]:
        """Overwrites the model with the other worker's, as `Fetch.fetch`.

        After an error the model is in an unknown state; another fetch can complete it.
        """
        assert self._fetch is not None
        self.end_offer()
        try:
            with self._model.loading():
                return self._fetch.fetch(self._bytes, timeout_s)
        finally:
            self.end_fetch()

    def end_fetch(self) -> None:
        """Closes the connection to the other worker, if there is one."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.close()

    @property
    def _bytes(self) -> ModelBytes:
        return ModelBytes(self._model.module)

    @property
    def _opaque(self) -> list[str]:
        return opaque_weights(self._model.module, on_cpu=self._model.on_cpu)
