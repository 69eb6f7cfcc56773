"""Images in a session: its ids go on with the images expanded."""

from harness.images import encoded, picture
from tests.engine.images.conftest import Vision

SMALL, WIDE = picture(56, 56, 1), picture(168, 56, 2)


def test_turns_go_on_with_images_and_samples_say_where_they_are(model: Vision):
    def asked(image, text: str) -> dict:
        url = {"url": f"data:image/png;base64,{encoded(image)}"}
        parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
        return {"role": "user", "content": parts}

    made = model.server.post("/sessions", {}).json()

    def turn(messages: list[dict]) -> dict:
        body = {"messages": messages, "max_tokens": 4, "return_token_ids": True}
        return model.server.post(f"{made['path']}/chat/completions", body).json()

    first = turn([asked(SMALL, "What is this?")])
    if "smol" in model.folder:
        # Its template takes texts only.
        assert "template accepts no images" in first["error"]["message"]
        return
    said = [asked(SMALL, "What is this?"), first["choices"][0]["message"]]
    second = turn([*said, asked(WIDE, "And this?")])
    # Another picture in a known place is another conversation.
    turn([asked(WIDE, "What is this?"), said[1], asked(WIDE, "And this?")])
    known = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    whole = second["prompt_token_ids"] + second["choices"][0]["token_ids"]
    assert whole[: len(known)] == known
    path = f"/sessions/{made['session_id']}"
    turns = model.server.get(path).json()["turns"]
    assert [(one["parent"], one["reason"]) for one in turns] == [
        (None, "first"), (0, ""), (None, "history")
    ]  # fmt: skip
    sample = model.server.get(f"{path}/samples").json()["samples"][0]
    assert sample["ids"] == whole
    assert sample["images"] == [encoded(SMALL), encoded(WIDE)]
    (start, length), (other, other_length) = sample["image_ranges"]
    assert len(known) <= other < other + other_length <= len(second["prompt_token_ids"])
    placeholder = whole[start]
    assert whole[start : start + length] == [placeholder] * length
    assert whole[other : other + other_length] == [placeholder] * other_length
    masked = [one for one, mask in zip(whole, sample["loss_mask"], strict=True) if mask]
    assert masked == first["choices"][0]["token_ids"] + second["choices"][0]["token_ids"]


def test_a_response_stands_for_the_images_before_it(model: Vision):
    if "smol" in model.folder:
        # Its template takes texts only.
        return
    made = model.server.post("/sessions", {}).json()

    def respond(parts: list[dict], **fields) -> dict:
        item = {"type": "message", "role": "user", "content": parts}
        body = {"input": [item], "max_output_tokens": 4, "return_token_ids": True, **fields}
        answer = model.server.post(f"{made['path']}/responses", body)
        assert answer.ok, answer.text
        return answer.json()

    def shown(image, text: str) -> list[dict]:
        url = f"data:image/png;base64,{encoded(image)}"
        return [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]

    first = respond(shown(SMALL, "What is this?"))
    respond(shown(WIDE, "And this?"), previous_response_id=first["id"])
    path = f"/sessions/{made['session_id']}"
    (sample,) = model.server.get(f"{path}/samples").json()["samples"]
    assert sample["reasons"] == ["first", ""]
    assert sample["images"] == [encoded(SMALL), encoded(WIDE)]
