"""Drift: the chat template renders messages to other ids than the client sent with them.

Drift is expected in multi-turn use: a tokenizer may encode the text of sampled ids differently. It
is only counted; the engine gets the client's ids.
"""

import logging
from typing import Any

import gevent

from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat, length_of, render_all
from app.inputs.request_templates import RequestTemplates
from app.inputs.tokenizer import TokenizerLoader
from app.inputs.tools import Tools, make_chat
from app.pool.link import Link
from app.route.fields import ChatFields
from titopool.errors import InvalidRequest, TitopoolError
from titopool.wire.messages import Drift

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0


class DriftWatch:
    """Compares prompts in the background while they generate.

    One prompt at a time: other requests wait for the tokenizer behind one comparison at most.
    Prompts that arrive during a comparison are not counted.
    """

    def __init__(self, link: Link, tokenizer: TokenizerLoader, templates: RequestTemplates):
        self._link = link
        self._tokenizer, self._templates = tokenizer, templates
        self._is_comparing = False

    def compare(self, fields: ChatFields, tools: Tools) -> None:
        """Starts to compare `fields.messages` with `fields.tokens`; returns at once."""
        if not self._is_comparing:
            self._is_comparing = True
            gevent.spawn(self._compare, fields, tools)

    def _compare(self, fields: ChatFields, tools: Tools) -> None:
        try:
            difference = self._difference(fields, tools)
        except TitopoolError as error:
            logger.debug("prompt not compared with its messages: %s", error)
            return
        finally:
            self._is_comparing = False
        if difference:
            logger.debug("drift: %s", difference)
        self._link.report(Drift(1, int(bool(difference))))

    def _difference(self, fields: ChatFields, tools: Tools) -> str:
        """How the rendered messages differ from the client's ids; "" if they are equal."""
        facts = self._link.facts
        # The client's ids may hold expanded images; a template writes one placeholder per image.
        placeholders = frozenset(facts.images.placeholder_ids if facts.images else ())
        try:
            messages = read_conversation(fields.messages, "messages").messages
            chat = make_chat(fields, messages, tools)
            chat = self._templates.rendered(chat, facts, TIMEOUT_S)
            return self._tokenizer.use(
                _compare, chat, fields.tokens or [], placeholders, facts.max_model_len,
                facts=facts, timeout_s=TIMEOUT_S, size=length_of(chat),
            )  # fmt: skip
        except InvalidRequest as error:
            return f"the messages cannot be rendered: {error}"


def _compare(
    tokenizer: Any,
    chat: Chat,
    tokens: list[int],
    placeholders: frozenset[int],
    max_model_len: int,
) -> str:
    (rendered,) = render_all(tokenizer, [chat], max_model_len)
    ours, sent = ([one for one in ids if one not in placeholders] for ids in (rendered, tokens))
    if ours == sent:
        return ""
    pairs = zip(ours, sent, strict=False)
    start = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(sent)))
    return (
        f"from token {start} on, the messages render to {ours[start : start + 5]}…, but the client "
        f"sent {sent[start : start + 5]}… ({len(ours)} and {len(sent)} tokens)"
    )
