"""Drift: messages that the chat template renders to other ids than those sent beside them.

In multi-turn use that is expected: ids that were sampled need not be those that a tokenizer
makes of their text. It is counted and nothing else: the engine gets the ids.
"""

import logging

import gevent

from app.conversations import read_conversation
from app.link import Link
from app.openai_bodies import ChatFields
from app.rendering import render_all
from app.tokenizer import TokenizerLoader
from app.tools import Tools, chat_of
from titopool.errors import InvalidRequest, TitopoolError

logger = logging.getLogger(__name__)

# Comparisons that may wait for the tokenizer; more prompts than that go uncounted.
MAX_WAITING = 256
TIMEOUT_S = 60.0


class DriftWatch:
    """Compares beside the generation, so that no request waits for it."""

    def __init__(self, link: Link, tokenizer: TokenizerLoader):
        self._link = link
        self._tokenizer = tokenizer
        self._num_waiting = 0

    def compare(self, fields: ChatFields, tools: Tools) -> None:
        """Starts a comparison of the messages of `fields` with its `tokens`; returns at once."""
        if self._num_waiting < MAX_WAITING:
            self._num_waiting += 1
            gevent.spawn(self._compare, fields, tools)

    def _compare(self, fields: ChatFields, tools: Tools) -> None:
        try:
            difference = self._difference(fields, tools)
        except TitopoolError as error:
            logger.debug("a prompt was not compared with its messages: %s", error)
            return
        finally:
            self._num_waiting -= 1
        if difference:
            logger.debug("drift: %s", difference)
        self._link.report_drift(has_drifted=bool(difference))

    def _difference(self, fields: ChatFields, tools: Tools) -> str:
        """How the rendered messages differ from the ids; "" if they do not."""
        facts = self._link.facts
        try:
            messages = read_conversation(fields.messages, "messages").messages
            (rendered,) = self._tokenizer.use(
                render_all, [chat_of(fields, messages, tools)], facts=facts, timeout_s=TIMEOUT_S
            )
        except InvalidRequest as error:
            return f"the messages cannot be rendered: {error}"
        # The ids may have images expanded; a template writes one placeholder for each.
        placeholders = set(facts.images.placeholder_ids if facts.images else ())
        made, given = (
            [one for one in ids if one not in placeholders]
            for ids in (rendered, fields.tokens or ())
        )
        if made == given:
            return ""
        pairs = zip(made, given, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(made), len(given)))
        return (
            f"from token {place} on the messages render to {made[place : place + 5]}…, the ids are "
            f"{given[place : place + 5]}… ({len(made)} and {len(given)} tokens)"
        )
