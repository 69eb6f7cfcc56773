"""Texts of single tokens: a character spread over several tokens is shown at its last token."""

import pytest
from transformers import AutoTokenizer

from app.outputs.token_texts import MAX_BEFORE, TextLookup, decode_alone, decode_in_context


@pytest.mark.parametrize("text", ["é\U0001f99c…\u0436a", "Hello, \U0001f99c!", "no such letters"])
def test_token_texts_join_to_the_whole_text(tiny_model: str, text: str):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    alone = decode_alone(tokenizer, ids)
    contexts = [(tuple(ids[max(0, end - MAX_BEFORE) : end]), one) for end, one in enumerate(ids)]
    in_context = decode_in_context(tokenizer, contexts)
    shown = [
        in_context[context] if alone[context[1]].endswith("\ufffd") else alone[context[1]]
        for context in contexts
    ]
    assert "".join(shown) == text


def test_an_incomplete_character_is_shown_as_nothing(tiny_model: str):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    first = tokenizer("\U0001f99c", add_special_tokens=False)["input_ids"][0]
    assert decode_in_context(tokenizer, [((first, first), first)]) == {((first, first), first): ""}


def test_the_context_of_the_first_tokens_begins_with_the_sequence():
    ids = list(range(MAX_BEFORE + 5))
    lookup = TextLookup({}, ids, as_ids=False)
    for end in range(MAX_BEFORE + 1):
        assert lookup.in_context(end, 7) == (tuple(ids[:end]), 7)
    assert lookup.in_context(MAX_BEFORE + 2, 7) == (tuple(ids[2 : MAX_BEFORE + 2]), 7)
