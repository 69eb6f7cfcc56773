"""The model's tokenizer, for prompts that come as text or as messages.

Loaded when the first text comes: transformers brings torch with it (seconds, 0.4 GB), and
trainers send ids. It works in a thread of its own, as it would hold up all other requests.
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

# How long a request with text waits while it is loaded.
LOADING_TIMEOUT_S = 60.0


# What tells one tokenizer from another.
TokenizerKey = tuple[str, str | None, bool, str]


def key_of(facts: WorkerFacts) -> TokenizerKey:
    """Changes with the tokenizer that the workers' engines have."""
    return (
        facts.tokenizer, facts.tokenizer_revision, facts.trust_remote_code, facts.tokenizer_digest,
    )  # fmt: skip


class TokenizerLoader:
    """Loads the tokenizer once and hands it texts, one request after the other."""

    def __init__(self) -> None:
        # A fast tokenizer's settings are not safe to share between threads: one, and in turn.
        self._turn = Semaphore()
        self._thread: ThreadPool | None = None
        # The tokenizer, once it is there, and what it was loaded for.
        self._loaded: AsyncResult | None = None
        self._loaded_for: TokenizerKey | None = None
        # Of single tokens, by their ids: those that answers have named so far.
        self.token_texts: dict[int, str] = {}

    def use(
        self, function: Callable[..., Result], *arguments: Any, facts: WorkerFacts, timeout_s: float
    ) -> Result:
        """`function(tokenizer, *arguments)`, in the tokenizer's thread.

        Raises:
            NoReadyWorker: the tokenizer cannot be loaded, or is not free within `timeout_s`.
        """
        busy = NoReadyWorker("the tokenizer is busy with other requests; try again")
        with gevent.Timeout(max(0.001, timeout_s), busy):
            tokenizer = self._get(facts)
            with self._turn:
                result, error = self._spawn(_caught, function, tokenizer, *arguments).get()
        if error is not None:
            raise error
        return cast("Result", result)

    def prepare(self, facts: WorkerFacts, *, timeout_s: float) -> None:
        """Loads the tokenizer unless it is there.

        Raises:
            NoReadyWorker: it cannot be loaded, or not in time.
        """
        is_right = self._loaded_for == key_of(facts)
        if self._loaded is None or not is_right or not self._loaded.successful():
            self.use(bool, facts=facts, timeout_s=timeout_s)

    def _get(self, facts: WorkerFacts) -> Any:
        if self._loaded is None or self._loaded_for != key_of(facts):
            # Workers elsewhere may come back with another model while this front end lives on.
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
                # The request's own deadline; the tokenizer is still being loaded.
                raise
            # The next request tries again.
            if self._loaded is loaded:
                self._loaded = None
            logger.exception("the tokenizer cannot be loaded")
            raise NoReadyWorker(
                f"this front end has no tokenizer: it cannot be loaded ({type(error).__name__}: "
                f"{error}); send token ids, or try again",
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
    """What `function` gives, or why it refuses: gevent logs what leaves a thread as an error."""
    try:
        return function(*arguments), None
    except TitopoolError as error:
        return None, error
