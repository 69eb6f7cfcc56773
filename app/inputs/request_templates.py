"""Renders conversations with the chat templates of requests, in processes apart.

Such a template is a client's code. transformers runs it in Jinja's sandbox, and a helper bounds its time and
its memory. The helpers are forks of a process that has neither the keys nor the requests of the front end.
"""

import json
import os
import sys
from dataclasses import replace
from functools import cache, partial
from typing import Any

import gevent
import msgspec
from gevent.lock import BoundedSemaphore

from app.inputs.chat_template import MAX_RENDER_S, Chat, text_by
from app.inputs.tokenizer import TokenizerKey, key_of, load, longest_token
from app.route.fields import Message
from titopool.conversations.chat_template import Arguments
from titopool.errors import InvalidRequest, NoReadyWorker, PromptTooLong, TitopoolError
from titopool.helpers.fork_server import Limits, Work
from titopool.helpers.helper import Helper
from titopool.helpers.spawned import SpawnedForkServer, serve
from titopool.launch import child_environment
from titopool.settings.config import SECRET_VARIABLES
from titopool.wire.messages import WorkerFacts

MAX_TEMPLATE_BYTES = 256 * 1024
MAX_HELPERS = 4
MAX_MEMORY_BYTES = 256 * 2**20
# A helper has a limit of CPU time; this one ends a helper that stands still.
HANG_S = 60.0
NICENESS = 5
_TITLE = "titopool::templates"
_TOO_DEAR = (
    f"chat_template: expected a template that renders the messages within {MAX_RENDER_S:g} s of CPU time "
    f"and {MAX_MEMORY_BYTES >> 20} MiB, got one that takes more; shorten its loops, or the messages"
)


class RequestTemplates:
    """The helpers of a front end. A helper has one template at a time, and forgets it by its end."""

    def __init__(self, is_trusted: bool):
        """`is_trusted`: the setting `trust_request_chat_template`."""
        self._is_trusted = is_trusted
        self._server: SpawnedForkServer | None = None
        self._server_for: TokenizerKey | None = None
        # The free helpers with their templates; the first one has been free for the longest time.
        self._free: list[tuple[str, Helper]] = []
        self._places = BoundedSemaphore(MAX_HELPERS)

    def check(self, template: str | None) -> None:
        """Refuses a template that is not trusted or too long.

        Raises:
            InvalidRequest: it is one of these.
        """
        if template and not self._is_trusted:
            raise InvalidRequest(
                "chat_template: expected none, as a template is code and this server trusts no request's, got "
                "one; start the server with --trust-request-chat-template, or leave it out",
                param="chat_template",
            )
        if template and (size := len(template.encode("utf-8", "replace"))) > MAX_TEMPLATE_BYTES:
            raise InvalidRequest(
                f"chat_template: expected at most {MAX_TEMPLATE_BYTES} bytes, got {size}; shorten it",
                param="chat_template",
            )

    def rendered(self, chat: Chat, facts: WorkerFacts, timeout_s: float) -> Chat:
        """The chat with its text, if it has a template of its own.

        Raises:
            InvalidRequest: as `check`; or the template refuses the messages, or exceeds a limit.
            PromptTooLong: it writes more characters than `max_model_len` tokens have.
            NoReadyWorker: no helper is free or can be started.
        """
        template = chat.chat_template
        if not template:
            return chat
        self.check(template)
        busy = NoReadyWorker(
            "the processes that render with templates of requests are busy; try again later"
        )
        with gevent.Timeout(max(0.001, timeout_s), busy), self._places:
            free = self._helpers(facts)
            known = [one for one, _ in free]
            has, helper = free.pop(known.index(template) if template in known else 0)
            if has != template:
                helper.end()
            has = ""
            try:
                text = _rendered(helper, chat, facts.max_model_len)
                has = template
            finally:
                free.append((has, helper))
        return replace(chat, text=text)

    def _helpers(self, facts: WorkerFacts) -> list[tuple[str, Helper]]:
        if self._server is None or self._server_for != key_of(facts):
            self.close()
            self._server = _server(facts)
            self._server_for = key_of(facts)
            # Calls that go on give their helpers back to the list from which they have them.
            self._free = [("", Helper(self._server)) for _ in range(MAX_HELPERS)]
        return self._free

    def close(self) -> None:
        """Ends the helpers; calls that wait for them fail."""
        if self._server is not None:
            self._server.close()


def _server(facts: WorkerFacts) -> SpawnedForkServer:
    environ = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    # Not by -m, as `app` itself imports this module.
    code = "from app.inputs.request_templates import main; main()"
    arguments = ["-c", code, msgspec.json.encode(facts).decode()]
    try:
        return SpawnedForkServer(_TITLE, arguments, child_environment(environ))
    except OSError as error:
        raise _not_started(error) from error


def _not_started(error: Exception) -> NoReadyWorker:
    return NoReadyWorker(
        f"the process that renders with templates of requests does not start ({error}); try again",
        retry_after_s=2,
    )


def _rendered(helper: Helper, chat: Chat, max_model_len: int) -> str:
    try:
        sent = [one["arguments"].sent for one in _functions(chat.messages)]
        # Python's own has all numbers that a message or a variable may have.
        request = json.dumps([vars(chat), sent, max_model_len]).encode()
    except RecursionError as error:
        raise InvalidRequest(
            "messages: expected no deep nesting beside a chat_template, got some; flatten them",
            param="messages",
        ) from error
    was_there = bool(helper.pid)
    try:
        helper.start()
    except OSError as error:
        raise _not_started(error) from error
    try:
        answer = helper.call(request, HANG_S)
    except OSError as error:
        if was_there and isinstance(error, ConnectionError):
            # It may have ended before the call; the next one is new.
            return _rendered(helper, chat, max_model_len)
        raise InvalidRequest(_TOO_DEAR, param="chat_template") from error
    assert isinstance(answer, bytes)
    kind, told = answer[:1], answer[1:]
    if kind == b"t":
        return told.decode()
    message, param = msgspec.json.decode(told, type=tuple[str, str])
    raise (PromptTooLong if kind == b"l" else InvalidRequest)(message, param=param)


def _functions(messages: list[Message]) -> list[dict[str, Any]]:
    """Those of the past calls."""
    return [call["function"] for one in messages for call in one.get("tool_calls") or ()]


# ---- in the helpers --------------------------------------------------------------------


def prepare(facts: WorkerFacts) -> Work:
    """What a helper does: it renders a chat with its template."""
    tokenizer = load(facts, leaves_out_torch=True)
    # Known before helpers are forked, which then need not look for it.
    longest = longest_token(tokenizer)

    @cache
    def take(template: str) -> None:
        """Once in a helper, as the tokenizer keeps what it has found out about its template."""
        # It may be the name of one of the model's.
        tokenizer.chat_template = tokenizer.get_chat_template(template)

    def answer(request: bytes) -> bytes:
        fields, sent, max_model_len = json.loads(request)
        for function, text in zip(_functions(fields["messages"]), sent, strict=True):
            function["arguments"] = Arguments(function["arguments"])
            function["arguments"].sent = text
        chat = Chat(**fields)
        kind, param = b"e", "chat_template"
        try:
            take(fields["chat_template"])
            text = text_by(tokenizer, chat)
            most = max_model_len * longest
            if len(text) <= most:
                return b"t" + text.encode()
            kind = b"l"
            message = (
                f"chat_template: expected a template that writes at most {most} characters, which are "
                f"{max_model_len} tokens (max_model_len), got {len(text)}; shorten what it writes"
            )
        except TitopoolError as error:
            message, param = error.message, error.param or param
        except MemoryError:
            message = _TOO_DEAR
        except Exception as error:
            # Templates raise arbitrary errors, on purpose or over unexpected messages.
            message = (
                "chat_template: expected a Jinja template that renders the messages, got "
                f"{type(error).__name__}: {error}"[:400]
                + "; correct the template or the messages"
            )
        return kind + msgspec.json.encode((message.encode("utf-8", "replace").decode(), param))

    return answer


def main() -> None:
    """In an interpreter of its own, whose argument is the facts."""
    facts = msgspec.json.decode(sys.argv[1], type=WorkerFacts)
    serve(_TITLE, partial(prepare, facts), Limits(MAX_RENDER_S, MAX_MEMORY_BYTES, NICENESS))
