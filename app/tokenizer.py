"""Text to ids: transformers' tokenizer of the model that the workers serve.

Importing transformers takes seconds, so a thread does it while the workers load; requests
with token ids never wait for it.
"""

import concurrent.futures
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from titopool.errors import NoReadyWorker

if TYPE_CHECKING:
    from app.link import Link

logger = logging.getLogger(__name__)


class TokenizerLoader:
    """Loads the tokenizer in the background and hands it out."""

    def __init__(self, link: "Link"):
        self._link = link
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tokenizer: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def start(self) -> None:
        """Starts loading in this process, once."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._load, name="tokenizer", daemon=True)
                self._thread.start()

    def _load(self) -> None:
        try:
            from transformers import AutoTokenizer

            facts = self._wait_for_facts()
            tokenizer = AutoTokenizer.from_pretrained(
                facts.tokenizer,
                revision=facts.tokenizer_revision,
                trust_remote_code=facts.trust_remote_code,
            )
            self._tokenizer.set_result(tokenizer)
        except Exception as error:
            logger.exception("the tokenizer cannot be loaded; prompts as text will be refused")
            self._tokenizer.set_exception(
                NoReadyWorker(
                    f"this front end cannot load the tokenizer ({type(error).__name__}: {error}); "
                    "send token ids, or give it the model's folder"
                )
            )

    def _wait_for_facts(self) -> Any:
        while True:
            try:
                return self._link.facts
            except NoReadyWorker:
                time.sleep(0.1)

    def encode(self, texts: list[str], timeout_s: float) -> list[list[int]]:
        """Token ids of each text, with the special tokens that vLLM adds to a text prompt.

        Raises:
            NoReadyWorker: the tokenizer is not loaded within `timeout_s`, or cannot be.
        """
        try:
            tokenizer = self._tokenizer.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise NoReadyWorker(
                "the tokenizer is still loading; try again", retry_after_s=2
            ) from None
        # One thread at a time: a fast tokenizer's settings are not safe to share.
        with self._lock:
            ids: list[list[int]] = tokenizer(texts)["input_ids"]
        return ids
