"""A server whose model writes a known text, with a thought and a call of a tool."""

from typing import NamedTuple

import openai

from harness.servers import Server

QUESTION = [{"role": "user", "content": "What is tito?"}]
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "boolean"}},
    "required": ["word"],
    "additionalProperties": False,
}
LOOK_UP = {
    "type": "function",
    # Not in the order in which templates receive the keys.
    "function": {"parameters": SCHEMA, "description": "a dictionary", "name": "look_up"},
}
ARGUMENTS = {"word": "tito"}


class Scripted(NamedTuple):
    """A server with the scripted model."""

    server: Server
    client: openai.OpenAI
    model: str
    # The ids that the model writes.
    ids: list[int]

    def chat(self, **fields):
        options = {"temperature": 0, "model": self.model, "messages": QUESTION, "tools": [LOOK_UP]}
        return self.client.chat.completions.create(**options | fields)
