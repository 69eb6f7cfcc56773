"""The model's tokenizer, for prompts that are text or messages.

Loaded for the first such prompt: importing transformers imports torch (seconds, 0.4 GB), and
trainers send ids. It runs in a thread, so that it does not block the other requests.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import gevent
from gevent.event import AsyncResult
from gevent.lock import Semaphore
from gevent.threadpool import ThreadPool

from titopool.errors import NoReadyWorker, TitopoolError
from titopool.wire.messages import WorkerFacts

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# How long a request waits while the tokenizer is loaded.
LOADING_TIMEOUT_S = 60.0
TokenizerKey = tuple[str, str | None, bool, str]


def key_of(facts: WorkerFacts) -> TokenizerKey:
    """Identifies the tokenizer of the workers' engines."""
    return (
        facts.tokenizer, facts.tokenizer_revision, facts.trust_remote_code, facts.tokenizer_digest,
    )  # fmt: skip


class TokenizerLoader:
    """Loads the tokenizer once, and calls it for one request after the other."""

    def __init__(self) -> None:
        # A fast tokenizer's settings are not safe to share, so calls run one at a time.
        self._lock = Semaphore()
        self._thread: ThreadPool | None = None
        # The tokenizer, or its loading, and the key that it was loaded for.
        self._loaded: AsyncResult | None = None
        self._loaded_for: TokenizerKey | None = None
        # Texts of single tokens that responses have shown, by id.
        self.token_texts: dict[int, str] = {}

    def use(
        self, function: Callable[..., Result], *arguments: Any, facts: WorkerFacts, timeout_s: float
    ) -> Result:
        """Calls `function(tokenizer, *arguments)` in the tokenizer's thread.

        Raises:
            NoReadyWorker: the tokenizer cannot be loaded, or `timeout_s` has passed.
            TitopoolError: what `function` raised.
        """
        busy = NoReadyWorker("the tokenizer is busy with other requests; try again later")
        with gevent.Timeout(max(0.001, timeout_s), busy):
            tokenizer = self._get(facts)
            with self._lock:
                result, error = self._spawn(_caught, function, tokenizer, *arguments).get()
        if error is not None:
            raise error
        return cast("Result", result)

    def prepare(self, facts: WorkerFacts, *, timeout_s: float) -> None:
        """Loads the tokenizer unless it is loaded.

        Raises:
            NoReadyWorker: the tokenizer cannot be loaded, or `timeout_s` has passed.
        """
        is_right = self._loaded_for == key_of(facts)
        if self._loaded is None or not is_right or not self._loaded.successful():
            self.use(bool, facts=facts, timeout_s=timeout_s)

    def _get(self, facts: WorkerFacts) -> Any:
        if self._loaded is None or self._loaded_for != key_of(facts):
            # Workers that run elsewhere may restart with another model.
            self._loaded, self._loaded_for = self._spawn(load, facts), key_of(facts)
            self.token_texts = {}
        loaded = self._loaded
        try:
            return loaded.get(timeout=LOADING_TIMEOUT_S)
        except gevent.Timeout:
            raise NoReadyWorker(
                "this front end is still loading the tokenizer; send token ids, or try again",
                retry_after_s=2,
            ) from None
        except Exception as error:
            if not loaded.ready():
                # The caller's timeout; the tokenizer is still loading.
                raise
            # Unset, so that the next request loads again.
            if self._loaded is loaded:
                self._loaded = None
            logger.exception("the tokenizer cannot be loaded")
            raise NoReadyWorker(
                f"the tokenizer cannot be loaded ({type(error).__name__}: {error}); send token ids, or "
                "try again",
                retry_after_s=2,
            ) from error

    def _spawn(self, function: Callable[..., Any], *arguments: Any) -> AsyncResult:
        if self._thread is None:
            self._thread = ThreadPool(1)
        return self._thread.spawn(function, *arguments)


def load(facts: WorkerFacts) -> Any:
    """transformers' tokenizer of the model that the workers serve."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        facts.tokenizer,
        revision=facts.tokenizer_revision,
        trust_remote_code=facts.trust_remote_code,
    )


def encode_all(
    tokenizer: Any, texts: list[str], with_special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of each text; by default with the special tokens that vLLM adds to a prompt."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=with_special_tokens)["input_ids"]
    return ids


def _caught(function: Callable[..., Any], *arguments: Any) -> tuple[Any, TitopoolError | None]:
    """The result or the TitopoolError of `function`: gevent logs exceptions that leave a thread."""
    try:
        return function(*arguments), None
    except TitopoolError as error:
        return None, error
