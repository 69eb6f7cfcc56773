"""/chat/, /tokenize, /detokenize and /v1/models over real vLLM, compared with transformers."""

import pytest
from transformers import AutoTokenizer

from harness.servers import Server
from tests.kit.models import reference
from tests.kit.peers.openai_calls import HELLO, rendered
from tests.kit.peers.trl_client import run_trl

TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "four"},
]
GREEDY = {"temperature": 0, "max_tokens": 6, "generation_kwargs": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str):
    return AutoTokenizer.from_pretrained(tiny_model)


def test_conversations_are_rendered_as_by_transformers(server: Server, tiny_model, tokenizer):
    flat = [{**TURNS[0], "content": "one\ntwo"}, *TURNS[1:]]
    expected = [rendered(tokenizer, HELLO), rendered(tokenizer, flat)]
    answer = server.post("/chat/", {"messages": [HELLO, TURNS], "n": 1, **GREEDY})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["prompt_ids"] == expected
    for ids, completion in zip(expected, body["completion_ids"], strict=True):
        assert completion == reference.greedy(tiny_model, ids, 6)
    assert [len(one) for one in body["logprobs"]] == [6, 6]
    same = server.generate(expected, **GREEDY)
    assert same["completion_ids"] == body["completion_ids"]


def test_chat_accepts_the_fields_of_generate(server: Server):
    body = {
        "messages": [HELLO], "n": 3, "max_tokens": 4, "logprobs": 2, "truncate_prompt_tokens": 5,
        "generation_kwargs": {"seed": 1},
    }  # fmt: skip
    answer = server.post("/chat/", body).json()
    assert [len(ids) for ids in answer["prompt_ids"]] == [5]
    assert len(answer["completion_ids"]) == 3
    binary = server.post("/chat/", body, headers={"Accept": "application/msgpack"})
    assert binary.headers["Content-Type"] == "application/msgpack"


BAD = {
    "no-conversation": ({"messages": []}, "messages", "empty list"),
    "no-message": ({"messages": [[]]}, "messages[0]", "empty list"),
    "one-conversation": ({"messages": HELLO}, "messages[0]", "array"),
    "no-role": ({"messages": [[{"content": "a"}]]}, "messages[0][0].role", "None"),
    "content-number": ({"messages": [HELLO, [{"role": "user", "content": 3}]]}, "messages[1][0].content"),
    "unknown-part": (
        {"messages": [[{"role": "user", "content": [{"type": "video", "video": "a"}]}]]},
        "messages[0][0].content[0]", "video",
    ),
    "image": (
        {"messages": [[{"role": "user", "content": [{"type": "image_pil", "image_pil": "aGk="}]}]]},
        "messages[0]: image", "expected no images",
    ),
    "template": ({"messages": [[{"role": "user"}]]}, "messages[0]", "chat template refused"),
    "arguments": (
        {"messages": [[{"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": "f"}]}]]},
        "messages[0][0].tool_calls[0].function", "an object",
    ),
    "own-template": ({"messages": [HELLO], "chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
    "prompts": ({"messages": [HELLO], "prompts": [[1]]}, "prompts"),
    "too-long": ({"messages": [[{"role": "user", "content": "word " * 600}]]}, "messages[0]", "511"),
    "temperature": ({"messages": [HELLO], "temperature": 3}, "temperature"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_conversations_are_refused_with_their_location(server: Server, name: str):
    body, *fragments = BAD[name]
    answer = server.post("/chat/", body)
    assert answer.status_code == 400, answer.text
    for fragment in fragments:
        assert fragment in answer.json()["error"]["message"]
    assert server.post("/chat/", {"messages": [HELLO], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("template, reads", [
    ("{% for m in messages %}any type of text:{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
    ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", False),
    ("{% for m in messages %}{{ m.content + '!' }}{% endfor %}", False),
])  # fmt: skip
def test_templates_that_read_content_parts_are_detected(tokenizer, template: str, reads: bool):
    from titopool.conversations.chat_template import ChatTemplate

    class Tokenizer:
        def apply_chat_template(self, messages, **options):
            return tokenizer.apply_chat_template(messages, chat_template=template, **options)

    assert ChatTemplate(Tokenizer()).accepts_parts == reads


def test_detokenize_reverses_tokenize(server: Server, tokenizer):
    text = "Hello, world: ü<|im_end|>"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer(text)["input_ids"]
    assert answer == {
        "count": len(ids), "max_model_len": 512, "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids),
    }  # fmt: skip
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
    answer = server.post("/detokenize", {"tokens": ids, "return_token_texts": True}).json()
    assert (answer["prompt"], "".join(answer["token_texts"])) == (text, text)
    assert len(answer["token_texts"]) == len(ids)


@pytest.mark.parametrize("options", [
    {}, {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
])  # fmt: skip
def test_tokenize_renders_messages_as_transformers_does(server: Server, tokenizer, options):
    answer = server.post("/tokenize", {"messages": HELLO, **options}).json()
    assert answer["tokens"] == rendered(tokenizer, HELLO, **options)


def test_tokenize_takes_vllms_fields_that_ask_for_nothing(server: Server, tokenizer):
    nothing = {"chat_template": None, "media_io_kwargs": {}, "add_generation_prompt": None}
    answer = server.post("/tokenize", {"messages": HELLO, **nothing})
    assert answer.json()["tokens"] == rendered(tokenizer, HELLO), answer.text


@pytest.mark.parametrize("path, body, part", [
    ("/tokenize", {"messages": HELLO, "chat_template": "{{ a }}"}, "chat_template"),
    ("/tokenize", {}, "either prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "either prompt or messages"),
    ("/tokenize", {"messages": HELLO, "continue_final_message": True}, "add_generation_prompt"),
    ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "chat template"),
    ("/detokenize", {"tokens": [1, 2048]}, "tokens[1]"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {}, "tokens"),
])  # fmt: skip
def test_bad_tokenize_bodies_are_refused(server: Server, path, body, part):
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_the_model_is_listed(server: Server, tiny_model: str):
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (tiny_model, "model", 512)


@pytest.mark.parametrize("version", ["0.29.1", "1.9.2"])
def test_trl_client_chats(server: Server, tokenizer, version: str):
    script = """
messages = [[{"role": "user", "content": "Hello, AI!"}], [{"role": "user", "content": "Tell me a joke"}]]
answer({
    "plain": client.chat(messages, n=2, max_tokens=4),
    "kwargs": client.chat(messages, max_tokens=4, chat_template_kwargs={"enable_thinking": False}),
})
"""
    answers = run_trl(version, server.url, script)
    for name, n in (("plain", 2), ("kwargs", 1)):
        assert answers[name]["prompt_ids"] == [
            rendered(tokenizer, [{"role": "user", "content": text}])
            for text in ("Hello, AI!", "Tell me a joke")
        ]
        assert len(answers[name]["completion_ids"]) == 2 * n


@pytest.mark.parametrize("arguments", ["{", "[]", None, {}, "{}"])
def test_a_conversation_with_a_malformed_tool_call_is_rendered(
    server: Server, tokenizer, arguments
):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": "a", "tool_calls": [call]}, HELLO[1]]
    answer = server.post("/chat/", {"messages": [messages], "max_tokens": 1})
    assert answer.json()["prompt_ids"] == [rendered(tokenizer, messages)]


def test_a_model_that_is_not_served_is_not_found(server: Server):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        answer = server.post(path, {**body, "model": "gpt-2"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
