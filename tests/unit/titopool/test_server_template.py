"""What follows a turn, where the server's tokenizer renders: its ids, and no second tokenization of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from titopool.conversations.templates import LocalTemplate, ServerTemplate
from titopool.conversations.turns import Turn, TurnRenderer, squeezed

SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]"]
# As Mistral's.
TEMPLATE = (
    "<s>{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)
HISTORY = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Writes a blank before each text between special tokens, and reads it back there: to decode and to
    encode again gives other ids."""
    letters = "▁abcdefghijklmnopqrstuvwxyz0123456789.?![]/<>"
    made = Tokenizer(models.BPE({one: index for index, one in enumerate(letters)}, []))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, eos_token="</s>")


class Served:
    """The routes of a server that render and tokenize."""

    def __init__(self, tokenizer: Any):
        self._template = LocalTemplate(tokenizer)

    def render(
        self, messages: Sequence[Any], *, add_generation_prompt: bool, **_: Any
    ) -> list[int]:
        ids = self._template.render(messages, (), is_prompt=add_generation_prompt)
        found: list[int] = ids.tolist()
        return found

    def tokenize(self, text: str, **_: Any) -> list[int]:
        found: list[int] = self._template.encode(text).tolist()
        return found

    def detokenize(self, ids: list[int]) -> str:
        return self._template.decode(np.array(ids, np.int32))


@pytest.mark.parametrize("answer", ["ok", "ok</s>"], ids=["cut", "ended"])
def test_what_follows_a_turn_has_the_ids_that_the_server_renders(tokenizer: Any, answer: str):
    served: Any = Served(tokenizer)
    appended = []
    for template in (ServerTemplate(served), LocalTemplate(tokenizer)):
        renderer = TurnRenderer(template, finds_family=False)
        text = template.text(HISTORY, ())
        turn = Turn(
            renderer.render(HISTORY, ()), LocalTemplate(tokenizer).encode(answer), HISTORY,
            lambda text=text: squeezed(text),  # type: ignore[misc]
        )  # fmt: skip
        found = renderer.follow(turn, [{"role": "user", "content": "more 7"}], ())
        assert found.difference is None
        assert found.ids is not None
        appended.append(found.ids.tolist())
    assert appended[0] == appended[1]
    # The template's own ids, and a round trip of theirs that is no identity.
    whole = [
        *HISTORY,
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more 7"},
    ]
    expected = served.render(whole, add_generation_prompt=True)
    assert expected[-len(appended[0]) :] == appended[0]
    assert served.tokenize(served.detokenize(expected)) != expected
