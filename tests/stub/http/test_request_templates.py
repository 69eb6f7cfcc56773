"""Chat templates of requests: ids are transformers', and no template costs another request anything."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests
from transformers import AutoTokenizer

from app.inputs.chat_template import MAX_RENDER_S
from app.inputs.request_templates import MAX_HELPERS, MAX_MEMORY_BYTES, MAX_TEMPLATE_BYTES
from harness.servers import Server, front_ends, wait_until
from tests.conftest import StartStub
from titopool.demo_model import make_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}],
    },
]
# What templates get that accept text only, and those that accept parts.
FLAT = [MESSAGES[0], {"role": "user", "content": "Hello\nyou"}]
PARTS = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, MESSAGES[1]]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% generation %}{% endgeneration %}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ mood }}>{% endif %}"
)
OF_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GIGABYTES = "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"
CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
KEY = "a-secret-of-the-front-end"


class Pool(NamedTuple):
    server: Server
    tokenizer: Any
    # One for each front end.
    sessions: list[requests.Session]

    def post(self, path: str, number: int = 0, **fields: Any) -> requests.Response:
        url, body = self.server.url + path, {"messages": MESSAGES, **fields}
        return self.sessions[number].post(url, json=body, timeout=60)

    def refused(self, path: str = TOKENIZE, **fields: Any) -> dict[str, Any]:
        answer = self.post(path, **fields)
        error: dict[str, Any] = answer.json()["error"]
        assert answer.status_code == 400, error
        return error


@pytest.fixture
def start(
    start_stub: StartStub, stub_server: Callable[..., Server], tmp_path: Path
) -> Callable[..., Pool]:
    def start(*options: str) -> Pool:
        make_tokenizer(tmp_path)
        start_stub(0, "--tokenizer", str(tmp_path))
        words = ("--num-front-ends", "2", *options)
        server = stub_server(1, *words, TITOPOOL_ADMIN_KEY=KEY)
        sessions = list(front_ends(server).values())
        return Pool(server, AutoTokenizer.from_pretrained(tmp_path), sessions)

    return start


@pytest.fixture
def pool(start: Callable[..., Pool]) -> Pool:
    return start("--trust-request-chat-template")


def ids_in(events: requests.Response) -> list[int]:
    first = events.text.split("\n\n")[0].removeprefix("data: ")
    ids: list[int] = json.loads(first)["prompt_token_ids"]
    return ids


def fork_servers(pool: Pool) -> list[psutil.Process]:
    """Those of the front ends; their children are the helpers."""
    front_ends = psutil.Process(pool.server.process.pid).children()
    children = [child for one in front_ends for child in one.children()]
    return [one for one in children if one.cmdline()[:1] == ["titopool::templates"]]


def test_without_the_option_a_template_is_refused_by_name(start: Callable[..., Pool]):
    pool = start()
    own = {"chat_template": PLAIN}
    chats = (CHAT, f"{CHAT}/render", TOKENIZE)
    bodies = [(path, own) for path in chats]
    bodies += [(f"{CHAT}/tokens", {"tokens": [5], **own})]
    bodies += [(path, {"chat_template_kwargs": own}) for path in chats]
    bodies += [("/chat/", {"messages": [MESSAGES], "chat_template_kwargs": own})]
    for path, fields in bodies:
        error = pool.refused(path, **fields)
        assert error["param"] == "chat_template"
        assert "--trust-request-chat-template" in error["message"]
    error = pool.refused("/v1/completions", prompt="a", **own)
    assert error["param"] in ("chat_template", "messages")
    for nothing in (None, ""):
        assert pool.post(CHAT, chat_template=nothing, max_tokens=1).status_code == 200
    assert not fork_servers(pool)


def test_ids_are_those_of_transformers(pool: Pool):
    def expected(messages: Any, template: str, **options: Any) -> list[int]:
        options = {"add_generation_prompt": True, "return_dict": False, **options}
        ids: list[int] = pool.tokenizer.apply_chat_template(
            messages, chat_template=template, **options
        )
        return ids

    body = {"return_token_ids": True, "max_tokens": 2}
    kwargs = {"mood": "well"}
    for number in (0, 1):
        for template, messages in ((PLAIN, FLAT), (OF_PARTS, PARTS), (PLAIN, FLAT)):
            ids = expected(messages, template, **kwargs)
            own = {"chat_template": template, "chat_template_kwargs": kwargs}
            within = {"chat_template_kwargs": {**kwargs, "chat_template": template}}
            for fields in (
                own,
                within,
                {**own, "chat_template_kwargs": {**kwargs, "chat_template": "x"}},
            ):
                assert pool.post(TOKENIZE, number, **fields).json()["tokens"] == ids
                whole = pool.post(CHAT, number, **body, **fields).json()
                assert whole["prompt_token_ids"] == ids
                assert ids_in(pool.post(CHAT, number, **body, stream=True, **fields)) == ids
                assert pool.post(f"{CHAT}/render", number, **fields).json()["token_ids"] == ids
            sent = pool.post(f"{CHAT}/tokens", number, tokens=ids, max_tokens=1, **own)
            assert sent.json()["prompt_token_ids"] == ids
            trl = pool.post("/chat/", number, **{**within, "messages": [MESSAGES, MESSAGES]})
            assert trl.json()["prompt_ids"] == [ids, ids]
    off = {"add_generation_prompt": False, "continue_final_message": True}
    ids = expected(FLAT, PLAIN, **off)
    assert pool.post(TOKENIZE, chat_template=PLAIN, **off).json()["tokens"] == ids


def test_calls_and_developers_are_written_as_the_template_reads_them(pool: Pool):
    """Not as the model's own template does."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    calling = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    messages = [{"role": "developer", "content": "Be brief."}, FLAT[1], calling]
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '' ~ c.function.name + c.function.arguments }}{% endfor %}"
        "{% endfor %}{# %s #}"
    )
    for name, role in (("", "system"), ("'developer'", "developer")):
        own = template.replace("%s", name)
        answer = pool.post(TOKENIZE, messages=messages, chat_template=own)
        text = pool.tokenizer.decode(answer.json()["tokens"])
        assert text == f'{role}Be brief.userHello\nyouassistantNonef{{"a": 1}}'


# With words of the error.
BAD = {
    "raises": ("{{ raise_exception('no cats') }}", "TemplateError: no cats"),
    "undefined": ("{{ messages[9].role }}", "UndefinedError"),
    "syntax": ("{% for m in messages %}", "TemplateSyntaxError"),
    "escape": ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    "changes": ("{{ messages.append(1) }}", "SecurityError"),
    "surrogate": ("{{ '\\ud800' }}", "UnicodeEncodeError"),
    "deep": ("{{" + "(" * 9999, "RecursionError"),
    "long": ("é" * (MAX_TEMPLATE_BYTES // 2 + 1), f"got {MAX_TEMPLATE_BYTES + 2};"),
    "text": ("{{ 'x' * 10000000 }}", "(max_model_len), got 10000000;"),
    "memory": ("{{ 'x' * 10**10 }}", f"{MAX_MEMORY_BYTES >> 20} MiB"),
}


def test_a_bad_template_is_refused_with_what_is_wrong(pool: Pool):
    for template, words in BAD.values():
        for fields in (
            {"chat_template": template},
            {"chat_template_kwargs": {"chat_template": template}},
        ):
            error = pool.refused(**fields)
            assert error["param"] == "chat_template"
            assert error["message"].startswith("chat_template: expected ")
            assert words in error["message"], error
    error = pool.refused(chat_template_kwargs={"chat_template": 7})
    assert error["param"] == "chat_template_kwargs"
    image = {"type": "image", "image": "AA=="}
    error = pool.refused(messages=[{"role": "user", "content": [image]}], chat_template=PLAIN)
    assert error["param"] == "messages"


def test_templates_that_never_end_hold_up_nobody(pool: Pool):
    for path in (CHAT, TOKENIZE):
        assert pool.post(path, chat_template=PLAIN).status_code == 200
    (front_end,) = (one.parent() for one in fork_servers(pool))
    sizes = []
    with ThreadPoolExecutor(8) as threads:
        hostile = [
            threads.submit(pool.refused, CHAT, chat_template=template + " " * number)
            for number, template in enumerate([LOOP, GIGABYTES, LOOP])
        ]
        while not all(one.done() for one in hostile):
            assert pool.post(CHAT, max_tokens=1).status_code == 200
            assert pool.post(TOKENIZE, chat_template=PLAIN).status_code == 200
            sizes.append(front_end.memory_info().rss)
            time.sleep(0.1)
        for one in hostile:
            error = one.result()
            assert error["param"] == "chat_template"
            assert f"{MAX_RENDER_S:g} s of CPU time" in error["message"]
    # Others were answered again and again while the templates ran.
    assert len(sizes) > 1
    assert max(sizes) - min(sizes) < MAX_MEMORY_BYTES / 8
    assert pool.post(TOKENIZE, chat_template="{% for a in [] %}{% endfor %}a").status_code == 200
    helpers = [helper for one in fork_servers(pool) for helper in one.children()]
    assert len(helpers) <= MAX_HELPERS


def test_what_was_killed_is_started_again(pool: Pool):
    def rendered() -> requests.Response:
        return pool.post(TOKENIZE, chat_template=PLAIN)

    ids = rendered().json()["tokens"]
    (server,) = fork_servers(pool)
    # A template that gets out of the sandbox finds no key.
    assert KEY not in Path(f"/proc/{server.pid}/environ").read_text()
    for one in (server.children()[0], server):
        (helper,) = server.children()
        os.kill(one.pid, signal.SIGKILL)
        wait_until(lambda helper=helper: not helper.is_running(), 10)
        assert rendered().json()["tokens"] == ids
    (server,) = fork_servers(pool)
    os.kill(server.ppid(), signal.SIGKILL)
    # With their front end, the helpers end too.
    wait_until(lambda: not server.is_running(), 10)
