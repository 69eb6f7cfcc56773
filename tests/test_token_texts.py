"""Texts of single tokens: a letter spread over several is shown where it ends."""

import pytest
from transformers import AutoTokenizer

from app.outputs.token_texts import MAX_BEFORE, decode_alone, decode_in_context


@pytest.mark.parametrize("text", ["é\U0001f99c…\u0436a", "Hello, \U0001f99c!", "no such letters"])
def test_the_tokens_make_up_the_text(tiny_model: str, text: str):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    alone = decode_alone(tokenizer, ids)
    places = [(tuple(ids[max(0, end - MAX_BEFORE) : end]), one) for end, one in enumerate(ids)]
    mended = decode_in_context(tokenizer, places)
    shown = [
        mended[place] if alone[place[1]].endswith("\ufffd") else alone[place[1]] for place in places
    ]
    assert "".join(shown) == text


def test_a_letter_without_its_end_is_shown_as_nothing(tiny_model: str):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    first = tokenizer("\U0001f99c", add_special_tokens=False)["input_ids"][0]
    assert decode_in_context(tokenizer, [((first, first), first)]) == {((first, first), first): ""}
