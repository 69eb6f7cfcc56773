"""`titopool.Client` with PIL images: the same as files in base64 in a JSON body."""

from harness.images import encoded, picture
from tests.engine.images.conftest import Vision
from titopool import Client

SAMPLING = {"max_tokens": 4, "temperature": 0.0}


def test_pil_images_give_what_json_gives(qwen: Vision):
    image, ids = picture(60, 90), qwen.ids("what is @?")
    plain = qwen.server.generate([ids], images=[[encoded(image)]], **SAMPLING)
    in_object = {"prompt_token_ids": ids, "multi_modal_data": {"image": [image]}}
    with Client(qwen.server.url, timeout_s=120) as client:
        results = client.generate(ids, images=image, **SAMPLING)
        results += client.generate([in_object], **SAMPLING)
        part = {"type": "image", "image": image}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        (answer,) = client.chat(messages, **SAMPLING)
        rendered = client.render(messages)
    for result in results:
        assert result.prompt_ids.tolist() == plain["prompt_ids"][0]
        assert result.completions[0].ids.tolist() == plain["completion_ids"][0]
    assert len(plain["prompt_ids"][0]) > len(ids)
    assert rendered.tolist() == answer.prompt_ids.tolist()
