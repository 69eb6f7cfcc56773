"""The model's tokenizer, for prompts that are text or messages.

Loaded for the first such prompt, as trainers send ids: importing transformers takes a second and 40
MB. With torch it takes three times as long and 0.4 GB, so a front end imports it without, unless the
model has code of its own. It runs in a thread, so that it does not block the other requests.

A text takes the tokenizer about a second per million characters, so texts that cannot fit the model
are refused before.
"""

import gc
import logging
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import gevent
from gevent.event import AsyncResult

from app.inputs.turns import Turns
from titopool.collector import without_collector
from titopool.errors import NoReadyWorker, PromptTooLong
from titopool.wire.messages import WorkerFacts

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# How long a request waits while the tokenizer is loaded.
LOADING_TIMEOUT_S = 60.0
# Characters of the texts that are tokenized in one turn, unless one text has more.
TURN_LENGTH = 65_536
# How many tokens a cut through a text adds at most, with room to spare.
CUT_TOKENS = 16
TokenizerKey = tuple[str, str | None, bool, str]


def key_of(facts: WorkerFacts) -> TokenizerKey:
    """Identifies the tokenizer of the workers' engines."""
    return (
        facts.tokenizer, facts.tokenizer_revision, facts.trust_remote_code, facts.tokenizer_digest,
    )  # fmt: skip


class TokenizerLoader:
    """Loads the tokenizer once, and calls it for one request after the other."""

    def __init__(self, chat_template: str | None = None) -> None:
        """`chat_template`: stands in place of the model's own."""
        self._chat_template = chat_template
        # Whether nothing else in this process needs transformers; app/gunicorn_hooks.py sets it.
        self.leaves_out_torch = False
        # A fast tokenizer's settings are not safe to share, so calls run one at a time.
        self._turns = Turns()
        # The tokenizer, or its loading, and the key that it was loaded for.
        self._loaded: AsyncResult | None = None
        self._loaded_for: TokenizerKey | None = None
        # Texts of single tokens that responses have shown, by id.
        self.token_texts: dict[int, str] = {}

    def use(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        facts: WorkerFacts,
        timeout_s: float,
        size: int = 0,
        is_short: bool = False,
        client: socket.socket | None = None,
    ) -> Result:
        """Calls `function(tokenizer, *arguments)` in the tokenizer's thread.

        Args:
            size: characters or tokens of the arguments. Short calls come before long ones.
            is_short: it takes about as long as the change to the thread and back (0.1 ms), and needs
                no thread if no other call is there.
            client: the connection of the request; None: it is not watched.

        Raises:
            NoReadyWorker: the tokenizer cannot be loaded, or `timeout_s` has passed.
            ClientGone: the client has hung up.
            TitopoolError: what `function` raised.
        """
        if is_short and self._turns.is_idle and self._is_loaded(facts):
            assert self._loaded is not None
            return function(self._loaded.get(block=False), *arguments)
        busy = NoReadyWorker("the tokenizer is busy with other requests; try again later")
        with gevent.Timeout(max(0.001, timeout_s), busy):
            tokenizer = self._get(facts)
            return self._turns.call(function, tokenizer, *arguments, size=size, client=client)

    def prepare(self, facts: WorkerFacts, *, timeout_s: float) -> None:
        """Loads the tokenizer unless it is loaded.

        Raises:
            NoReadyWorker: the tokenizer cannot be loaded, or `timeout_s` has passed.
        """
        if not self._is_loaded(facts):
            self.use(bool, facts=facts, timeout_s=timeout_s)

    def _is_loaded(self, facts: WorkerFacts) -> bool:
        is_right = self._loaded_for == key_of(facts)
        return is_right and self._loaded is not None and bool(self._loaded.successful())

    def _get(self, facts: WorkerFacts) -> Any:
        if self._loaded is None or self._loaded_for != key_of(facts):
            # Workers that run elsewhere may restart with another model.
            self._loaded = self._turns.submit(
                load, facts, self.leaves_out_torch, self._chat_template
            )
            self._loaded_for = key_of(facts)
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


def load(facts: WorkerFacts, leaves_out_torch: bool, chat_template: str | None = None) -> Any:
    """transformers' tokenizer of the model that the workers serve.

    Args:
        leaves_out_torch: nothing else in this process needs transformers' models.
        chat_template: stands in place of the model's own.
    """
    # A model's own code may import transformers' models, also for its configuration or tokenizer.
    leaves_out_torch = leaves_out_torch and not facts.trust_remote_code
    with without_torch() if leaves_out_torch else nullcontext(), without_collector():
        from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            facts.tokenizer,
            revision=facts.tokenizer_revision,
            trust_remote_code=facts.trust_remote_code,
        )
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        return tokenizer
    finally:
        # What was imported stays, also if there is no tokenizer. Each collection would visit it, for
        # 0.2 s in which all streams stand still. Open requests are exempt too; their end frees them.
        gc.collect()
        gc.freeze()


@contextmanager
def without_torch() -> Iterator[None]:
    """Within the block torch cannot be imported, unless it is already.

    transformers, imported here, never has models in this process. If workers restart with a model that
    has code of its own, that code may fail here until the server restarts.
    """
    if "torch" in sys.modules:
        yield
        return
    logging.getLogger("transformers").addFilter(_without_advice)
    # For `import` and for `importlib.util.find_spec`, such a module does not exist.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _without_advice(record: logging.LogRecord) -> bool:
    """Leaves out transformers' warning that it has no models."""
    return "PyTorch was not found" not in record.getMessage()


def encode_all(
    tokenizer: Any,
    texts: Sequence[str],
    locations: Sequence[str],
    max_model_len: int,
    with_special_tokens: bool = True,
    is_truncated: bool = False,
) -> list[list[int]]:
    """Token ids of each text; by default with the special tokens that vLLM adds to a prompt.

    Args:
        locations: where each text stands in the client's body.
        is_truncated: whether only a prompt's last ids are used: a text that is too long loses its
            beginning.

    Raises:
        PromptTooLong: a text has so many characters that its tokens exceed `max_model_len`.
    """
    if is_truncated:
        # As vLLM's server does.
        most = max_model_len * longest_token(tokenizer)
        texts = [text[-most:] for text in texts]
    else:
        for text, location in zip(texts, locations, strict=True):
            check_text(tokenizer, text, location, max_model_len)
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=with_special_tokens)[
        "input_ids"
    ]
    return ids


def decode_all(tokenizer: Any, prompts: Iterable[Sequence[int]]) -> list[str]:
    """The text of each list of ids, with special tokens."""
    return [tokenizer.decode(ids) for ids in prompts]


def check_text(tokenizer: Any, text: str, location: str, max_model_len: int) -> None:
    """Refuses a text that is far too long, in much less time than it takes to tokenize it.

    A text of several times the usual length of a token for each of the model's tokens is judged by
    its slices, one after the other, as one token may be a hundred characters long.

    Raises:
        PromptTooLong: the text has more than `max_model_len` tokens.
    """
    if len(text) <= 8 * max_model_len:
        return
    most, num_tokens = max_model_len * longest_token(tokenizer), 0
    if len(text) <= most:
        step = 4 * max_model_len
        for most in range(step, len(text) + step, step):
            ids = tokenizer(text[most - step : most], add_special_tokens=False)["input_ids"]
            # A slice may cut tokens at both ends.
            num_tokens += len(ids) - CUT_TOKENS
            if num_tokens > max_model_len:
                break
        else:
            return
    raise PromptTooLong(
        f"{location}: expected a text of at most {max_model_len} tokens (max_model_len), got one of "
        f"{len(text)} characters, of which the first {min(most, len(text))} alone are more tokens, which exceeds the "
        "model's context length; shorten the text",
        param=location.partition("[")[0],
    )


def longest_token(tokenizer: Any) -> int:
    """Characters of the longest token; vLLM's `max_chars_per_token`."""
    known = getattr(tokenizer, "titopool_longest_token", None)
    if known is None:
        known = tokenizer.titopool_longest_token = max(map(len, tokenizer.get_vocab()))
    return int(known)


def batches_of(lengths: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """The texts that are tokenized in each turn, and their characters together.

    Args:
        lengths: characters of each text.
    """
    start = total = 0
    for index, length in enumerate(lengths):
        if total and total + length > TURN_LENGTH:
            yield slice(start, index), total
            start, total = index, 0
        # An empty text takes time too.
        total += length + 1
    yield slice(start, len(lengths)), total
