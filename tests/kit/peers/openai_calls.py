"""What tests send with the openai package, and the chunks of its streams, joined."""

import openai

from harness.servers import Server

IDS = [42, 1393, 14]
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, ü!"}]


def rendered(tokenizer, messages: list[dict], **options) -> list[int]:
    options = {"add_generation_prompt": True, **options}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def gathered(chunks) -> dict[int, dict]:
    """The joined chunks of a completion stream, by choice."""
    found: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = found.setdefault(
                choice.index, {"text": [], "ids": [], "values": [], "end": None, "offsets": []}
            )
            one["text"].append(choice.text)
            one["ids"] += getattr(choice, "token_ids", None) or []
            if choice.logprobs:
                one["values"] += choice.logprobs.token_logprobs
                one["offsets"] += choice.logprobs.text_offset
            assert one["end"] is None, "a choice went on after its end"
            one["end"] = choice.finish_reason
    return found
