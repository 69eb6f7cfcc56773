"""Text to ids: transformers' tokenizer of the model that the workers serve.

Importing transformers takes seconds, so a thread does it while the workers load; requests
with token ids never wait for it.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from titopool.errors import NoReadyWorker

if TYPE_CHECKING:
    from app.link import Link

logger = logging.getLogger(__name__)


# How long a request with text waits for it.
LOADING_TIMEOUT_S = 60.0
# Pauses between attempts to load.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class TokenizerLoader:
    """Loads the tokenizer in the background, until it succeeds, and hands it out."""

    def __init__(self, link: "Link"):
        self._link = link
        self._start_lock = threading.Lock()
        # A fast tokenizer's settings are not safe to share between threads.
        self._encode_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_loaded = threading.Event()
        self._tokenizer: Any = None
        self._last_error = "it is still loading"

    def start(self) -> None:
        """Starts loading in this process, once."""
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tokenizer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._is_loaded.is_set():
            try:
                self._load()
            except NoReadyWorker:
                time.sleep(0.1)
            except Exception as error:
                logger.exception("the tokenizer cannot be loaded; again in %g s", pause_s)
                self._last_error = f"it cannot be loaded ({type(error).__name__}: {error})"
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _load(self) -> None:
        from transformers import AutoTokenizer

        facts = self._link.facts
        self._tokenizer = AutoTokenizer.from_pretrained(
            facts.tokenizer,
            revision=facts.tokenizer_revision,
            trust_remote_code=facts.trust_remote_code,
        )
        self._is_loaded.set()

    def encode(self, texts: list[str], timeout_s: float) -> list[list[int]]:
        """Token ids of each text, with the special tokens that vLLM adds to a text prompt.

        Raises:
            NoReadyWorker: the tokenizer is not loaded, or not free, within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        if not self._is_loaded.wait(min(timeout_s, LOADING_TIMEOUT_S)):
            raise NoReadyWorker(
                f"this front end has no tokenizer: {self._last_error}; send token ids, or try again",
                retry_after_s=2,
            )
        if not self._encode_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NoReadyWorker("the tokenizer is busy with other requests; try again")
        try:
            ids: list[list[int]] = self._tokenizer(texts)["input_ids"]
        finally:
            self._encode_lock.release()
        return ids
