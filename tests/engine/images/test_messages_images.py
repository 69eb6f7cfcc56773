"""Images in Anthropic's Messages, also in results of tools."""

from harness.images import encoded, picture
from tests.engine.images.conftest import Vision

SMALL, WIDE = picture(56, 56, 1), picture(168, 56, 2)


def test_images_are_those_of_the_same_chat(model: Vision):
    def block(image) -> dict:
        source = {"type": "base64", "media_type": "image/png", "data": encoded(image)}
        return {"type": "image", "source": source}

    def part(image) -> dict:
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{encoded(image)}"},
        }

    text, call = {"type": "text", "text": "What is this?"}, {"name": "look", "arguments": {}}
    blocks = [
        {"role": "user", "content": [block(SMALL), text]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [text, block(WIDE)]},
        ]},
    ]  # fmt: skip
    messages = [
        {"role": "user", "content": [part(SMALL), text]},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": [text, part(WIDE)]},
    ]  # fmt: skip
    asked = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answer = model.server.post("/v1/messages", {"messages": blocks, **asked}).json()
    if "smol" in model.folder:
        # Its template takes texts only.
        assert "template accepts no images" in answer["error"]["message"]
        return
    chat = model.server.post("/v1/chat/completions", {"messages": messages, **asked}).json()
    assert answer["prompt_token_ids"] == chat["prompt_token_ids"]
    assert answer["token_ids"] == chat["choices"][0]["token_ids"]
    counted = model.server.post("/v1/messages/count_tokens", {"messages": blocks})
    assert counted.json() == {"input_tokens": len(answer["prompt_token_ids"])}
