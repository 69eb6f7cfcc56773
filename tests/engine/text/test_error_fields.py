"""`param` of an error names the field of the client's body that is wrong or missing."""

import pytest

from app.inputs.images import EncodedImages, read_images
from app.openai.bodies import ChatFields, CompletionsFields, OpenAIDecoder
from app.route.decoding import decode_body
from app.trl.bodies import GENERATE_BODY
from harness.servers import Server
from tests.kit.workers.pools import FACTS
from titopool.errors import InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.wire.messages import ImageFacts


@pytest.mark.parametrize(
    "body, message, param",
    [
        (b"{}", "missing required field `prompts`", "prompts"),
        (b'{"prompts": [], "x": 1}', "unknown field `x`", "x"),
        (b'{"prompt": []}', "unknown field `prompt`; did you mean `prompts`?", "prompt"),
        (b'{"prompts": [], "a b": 1}', "unknown field `a b`", None),
        (b'{"prompts": [[1.5]]}', "prompts[0][0]: expected `int`", "prompts"),
        (b'{"prompts": [{"prompt_token_ids": [], "x": 1}]}', "prompts[0]: object contains", "prompts"),
        (b"[]", "expected `object`", None),
    ],
)  # fmt: skip
def test_param_of_a_generate_body(body: bytes, message: str, param: str | None):
    with pytest.raises(InvalidRequest) as caught:
        decode_body(body, GENERATE_BODY)
    assert message in caught.value.message
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body, fields, message, param",
    [
        (b"{}", ChatFields, "missing required field `messages`", "messages"),
        (b"{}", CompletionsFields, "missing required field `prompt`", "prompt"),
        (b'{"prompt": "a", "nope": 1}', CompletionsFields, "contains unknown field `nope`", "nope"),
        (b'{"prompt": "a", "logit_bias": {"a": 1}}', CompletionsFields, "logit_bias: expected `int`", "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"5": 1e31}}', CompletionsFields, "logit_bias", "logit_bias"),
        (b'{"prompt": "a", "repetition_penalty": 1e-39}', CompletionsFields, "repetition_penalty: expected `float` >= 1e-06", "repetition_penalty"),
        (b'{"prompt": "a", "repetition_penalty": 1e39}', CompletionsFields, "repetition_penalty: expected `float` <= 1000000.0", "repetition_penalty"),
        (b'{"prompt": "a", "seed": NaN}', CompletionsFields, "expected a JSON body", None),
        (b'{"prompt": "a", "temperature": 1e400}', CompletionsFields, "[...]: number out of range", None),
        (b'{"prompt": "a", "stream_options": {"x": 1}}', CompletionsFields, "stream_options: object", "stream_options"),
        (b'{"messages": [], "top_logprobs": 1}', ChatFields, "top_logprobs: expected 0", "top_logprobs"),
    ],
)  # fmt: skip
def test_param_of_an_openai_body(body: bytes, fields: type, message: str, param: str | None):
    with pytest.raises(InvalidRequest) as caught:
        decode_body(body, OpenAIDecoder(fields))
    assert caught.value.message.startswith((message, "object " + message))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "place, param",
    [("images[0]", "images"), ("messages[1]: image", "messages"), ("messages: image", "messages"),
     ("prompts[2].multi_modal_data.image", "prompts")],
)  # fmt: skip
@pytest.mark.parametrize("takes_images", [False, True])
def test_param_of_an_image(place: str, param: str, takes_images: bool):
    images = ImageFacts(max_images=1, placeholder_ids=[5], has_placeholders=True)
    facts = FACTS if not takes_images else type(FACTS)(**{**_fields(), "images": images})
    encoded = EncodedImages("prompt", place, ["no base64"], True, {})
    with pytest.raises(InvalidRequest) as caught:
        read_images(encoded, facts, ServerConfig())
    assert caught.value.message.startswith(place)
    assert caught.value.param == param


def test_a_long_name_is_not_repeated_whole():
    body = b'{"prompts": [], "%s": 1}' % (b"x" * 100_000)
    with pytest.raises(InvalidRequest) as caught:
        decode_body(body, GENERATE_BODY)
    message = caught.value.message
    assert message.startswith("object contains unknown field `xxx")
    assert "characters …] xxx" in message
    assert len(message) < 5_000


def _fields() -> dict[str, object]:
    return {name: getattr(FACTS, name) for name in FACTS.__struct_fields__}


def test_param_of_a_regex(server: Server):
    body = {"prompts": [[1]], "structured_outputs_regex": "a\0"}
    error = server.post("/generate/", body).json()["error"]
    assert error["param"] == "structured_outputs_regex"
    assert error["message"].startswith("structured_outputs_regex: expected a regex without NUL")
    body = {"prompts": [[1]], "generation_kwargs": {"structured_outputs": {"regex": "a\0"}}}
    assert server.post("/generate/", body).json()["error"]["param"] == "structured_outputs"
