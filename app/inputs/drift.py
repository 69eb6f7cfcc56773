"""Drift: messages that the chat template renders to other ids than those sent beside them.

In multi-turn use that is expected: ids that were sampled need not be those that a tokenizer
makes of their text. It is counted and nothing else: the engine gets the ids.
"""

import logging
from typing import Any

import gevent

from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat, render_all
from app.inputs.tokenizer import TokenizerLoader
from app.inputs.tools import Tools, make_chat
from app.pool.link import Link
from app.schemas.openai import ChatFields
from titopool.errors import InvalidRequest, TitopoolError

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0


class DriftWatch:
    """Compares beside the generation.

    One prompt at a time, so that requests wait for the tokenizer behind one at most; those that
    come meanwhile go uncounted.
    """

    def __init__(self, link: Link, tokenizer: TokenizerLoader):
        self._link = link
        self._tokenizer = tokenizer
        self._is_comparing = False

    def compare(self, fields: ChatFields, tools: Tools) -> None:
        """Starts a comparison of the messages of `fields` with its `tokens`; returns at once."""
        if not self._is_comparing:
            self._is_comparing = True
            gevent.spawn(self._compare, fields, tools)

    def _compare(self, fields: ChatFields, tools: Tools) -> None:
        try:
            difference = self._difference(fields, tools)
        except TitopoolError as error:
            logger.debug("a prompt was not compared with its messages: %s", error)
            return
        finally:
            self._is_comparing = False
        if difference:
            logger.debug("drift: %s", difference)
        self._link.report_drift(has_drifted=bool(difference))

    def _difference(self, fields: ChatFields, tools: Tools) -> str:
        """How the rendered messages differ from the ids; "" if they do not."""
        facts = self._link.facts
        # The ids may have images expanded; a template writes one placeholder for each.
        placeholders = frozenset(facts.images.placeholder_ids if facts.images else ())
        try:
            messages = read_conversation(fields.messages, "messages").messages
            return self._tokenizer.use(
                _compare, make_chat(fields, messages, tools), fields.tokens or [], placeholders,
                facts=facts, timeout_s=TIMEOUT_S,
            )  # fmt: skip
        except InvalidRequest as error:
            return f"the messages cannot be rendered: {error}"


def _compare(tokenizer: Any, chat: Chat, tokens: list[int], placeholders: frozenset[int]) -> str:
    (rendered,) = render_all(tokenizer, [chat])
    made, given = ([one for one in ids if one not in placeholders] for ids in (rendered, tokens))
    if made == given:
        return ""
    pairs = zip(made, given, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(made), len(given)))
    return (
        f"from token {place} on the messages render to {made[place : place + 5]}…, the ids are "
        f"{given[place : place + 5]}… ({len(made)} and {len(given)} tokens)"
    )
