"""Sessions of agents with unmodified clients over real vLLM: ids go on from those that were sampled."""

import json
import threading
import time
from typing import Any

import anthropic
import msgspec
import numpy as np
import openai
import pytest
import requests

from harness.servers import Server, front_ends, wait_until
from tests.kit.peers.openai_calls import HELLO
from tests.kit.peers.scripted_server import ARGUMENTS, LOOK_UP, Scripted

QUESTION = "What is tito?"
RESULT = "A pool."
MORE = "And now?"
IDS = {"return_token_ids": True, "logprobs": 0}
IN_MESSAGES = {
    "name": "look_up", "description": "a dictionary", "input_schema": LOOK_UP["function"]["parameters"]
}  # fmt: skip
IN_RESPONSES = {"type": "function", **LOOK_UP["function"]}


class Agent:
    """A harness: three turns, of which the second one follows a result of a tool. It sends back what it
    got as such harnesses do: without thoughts, with other blanks, keys in another order, other ids of calls."""

    def __init__(self, url: str, key: str, model: str):
        self.url, self.key, self.model = url, key, model
        # Of each turn: the prompt's ids and the sampled ones.
        self.turns: list[tuple[list[int], list[int], list[float]]] = []

    def play(self) -> None:
        """Raises: what the client raises."""
        raise NotImplementedError


class ChatAgent(Agent):
    def play(self) -> None:
        client = openai.OpenAI(base_url=self.url, api_key=self.key, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for turn in range(3):
            answer = client.chat.completions.create(
                model=self.model, messages=messages, tools=[LOOK_UP], temperature=0, logprobs=True,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            (choice,) = answer.choices
            values = [one.logprob for one in choice.logprobs.content]
            self.turns.append((answer.prompt_token_ids, choice.token_ids, values))
            (call,) = choice.message.tool_calls
            given = json.dumps(json.loads(call.function.arguments), indent=2, sort_keys=True)
            name = f"renamed-{turn}"
            called = {"name": call.function.name, "arguments": given}
            messages += [
                {
                    "role": "assistant",
                    "content": f"  {choice.message.content} \n",
                    "tool_calls": [{"id": name, "type": "function", "function": called}],
                },
                {"role": "tool", "tool_call_id": name, "content": RESULT},
            ]


class MessagesAgent(Agent):
    def play(self) -> None:
        client = anthropic.Anthropic(
            base_url=self.url.removesuffix("/v1"), api_key=self.key, max_retries=0
        )
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for turn in range(3):
            with client.messages.stream(
                model=self.model, max_tokens=64, messages=messages, tools=[IN_MESSAGES],
                extra_body={"return_token_ids": True, "temperature": 0},
            ) as stream:  # fmt: skip
                for event in stream:
                    if event.type == "message_delta":
                        ended = event.model_dump()
                answer = stream.get_final_message()
            found = ended["prompt_token_ids"], ended["token_ids"], ended["token_logprobs"]
            self.turns.append(found)
            kept = [one for one in answer.content if one.type != "thinking"]
            (call,) = [one for one in kept if one.type == "tool_use"]
            assert call.input == ARGUMENTS
            # The mark of the cache moves to the last message.
            mark = {"cache_control": {"type": "ephemeral"}} if turn else {}
            messages += [
                {"role": "assistant", "content": [one.model_dump() for one in kept]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": call.id, "content": RESULT, **mark}
                    ],
                },
            ]


class ResponsesAgent(Agent):
    def play(self) -> None:
        client = openai.OpenAI(base_url=self.url, api_key=self.key, max_retries=0)
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        last = None
        for _ in range(3):
            answer = client.responses.create(
                model=self.model, input=items, tools=[IN_RESPONSES], temperature=0,
                previous_response_id=last, extra_body={"return_token_ids": True},
            )  # fmt: skip
            found = answer.model_dump()
            self.turns.append(
                (found["prompt_token_ids"], found["token_ids"], found["token_logprobs"])
            )
            (call,) = [one for one in answer.output if one.type == "function_call"]
            items = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
            last = answer.id


def make(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post("/sessions", body)
    assert answer.ok, answer.text
    found: dict[str, Any] = answer.json()
    return found


def read(server: Server, made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"/sessions/{made['session_id']}").json()
    return found


def samples(server: Server, made: dict[str, Any]) -> list[dict[str, Any]]:
    """As MessagePack, which says the same as JSON."""
    url = f"{server.url}/sessions/{made['session_id']}/samples"
    whole = requests.get(url, headers={"Accept": "application/msgpack"}, timeout=30)
    found: list[dict[str, Any]] = msgspec.msgpack.decode(whole.content)["samples"]
    types = {"ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}
    for one, other in zip(found, requests.get(url, timeout=30).json()["samples"], strict=True):
        one |= {name: np.frombuffer(one[name], kind).tolist() for name, kind in types.items()}
        assert one.pop("logprobs") == pytest.approx(other["logprobs"], abs=1e-6)
        assert one == {name: other[name] for name in one}
        one["logprobs"] = other["logprobs"]
    return found


@pytest.mark.parametrize("kind", [ChatAgent, MessagesAgent, ResponsesAgent])
@pytest.mark.parametrize("by", ["path", "key"])
def test_a_harness_of_each_dialect_stays_one_branch(scripted: Scripted, kind: type[Agent], by: str):
    server, made = scripted.server, make(scripted.server, metadata={"task": 7})
    url, key = (made["path"], "none") if by == "path" else ("/v1", made["key"])
    agent = kind(server.url + url, key, scripted.model)
    agent.play()
    assert [ids for _, ids, _ in agent.turns] == [scripted.ids] * 3
    known: list[int] = []
    for prompt, ids, _ in agent.turns:
        assert prompt[: len(known)] == known
        known = prompt + ids
    found = read(server, made)
    assert [turn["reason"] for turn in found["turns"]] == ["first", "", ""]
    assert [turn["parent"] for turn in found["turns"]] == [None, 0, 1]
    assert found["metadata"]["task"] == 7
    assert found["num_branches"] == 1
    assert found["turns"][1]["messages"][0]["role"] == "tool"
    assert found["turns"][2]["message"]["tool_calls"][0]["function"]["name"] == "look_up"
    (sample,) = samples(server, made)
    assert sample["ids"] == known
    masked = [one for one, mask in zip(known, sample["loss_mask"], strict=True) if mask]
    assert masked == scripted.ids * 3
    values = [one for *_, given in agent.turns for one in given]
    taken = [one for one, mask in zip(sample["logprobs"], sample["loss_mask"], strict=True) if mask]
    assert taken == pytest.approx(values, abs=1e-5)
    assert sample["weight_versions"] == [[0, len(prompt)] for prompt, *_ in agent.turns]


def turn_of(
    server: Server, made: dict[str, Any], messages: list[Any], **fields: Any
) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 4, "return_token_ids": True, **fields}
    answer = requests.post(f"{server.url}{made['path']}/chat/completions", json=body, timeout=60)
    assert answer.ok, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(answer: dict[str, Any], choice: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][choice]["message"]
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_what_begins_a_branch_says_why(server: Server):
    made = make(server)
    first = turn_of(server, made, HELLO)
    second = [*HELLO, said(first), user(MORE)]
    # The same again, another message there, other messages, system prompts and template's variables.
    turn_of(server, made, second)
    turn_of(server, made, second)
    turn_of(server, made, [*HELLO, said(first), user("Why?")])
    turn_of(server, made, [HELLO[0], user("a summary")])
    turn_of(server, made, [user(MORE)])
    turn_of(server, made, second, chat_template_kwargs={"other": True})
    # The answer goes on from a text of the client's.
    turn_of(
        server, made, [*HELLO, {"role": "assistant", "content": "I"}],
        add_generation_prompt=False, continue_final_message=True,
    )  # fmt: skip
    chosen = turn_of(
        server, made, [*second, {"role": "assistant", "content": "mine"}, user("?")], n=2
    )
    turn_of(
        server,
        made,
        [*second, {"role": "assistant", "content": "mine"}, user("?"), said(chosen, 1), user("!")],
    )
    found = read(server, made)["turns"]
    assert [(one["parent"], one["reason"]) for one in found] == [
        (None, "first"), (0, ""), (0, "retry"), (0, "fork"), (None, "history"), (None, "system"),
        (None, "context"), (None, "prefill"), (None, "history"), (None, "choice"), (9, ""),
    ]  # fmt: skip
    metrics = server.get("/metrics").text
    assert 'titopool_session_branches_total{reason="retry"}' in metrics
    taken = samples(server, made)
    assert [one["turns"] for one in taken] == [
        [0, 1], [0, 2], [0, 3], [4], [5], [6], [7], [8], [9, 10]
    ]  # fmt: skip
    assert [one["was_retried"] for one in taken] == [True] + [False] * 8
    # Each sampled token counts once.
    assert sum(sum(one["loss_mask"]) for one in taken) == sum(
        one["completion_tokens"] for one in found
    )


def test_any_front_end_goes_on_and_a_long_conversation_keeps_its_ids(server: Server):
    made = make(server)
    url, messages, known = f"{server.url}{made['path']}/chat/completions", [*HELLO], list[int]()
    sessions = list(front_ends(server).values())
    for turn in range(6):
        body = {"messages": messages, "max_tokens": 5, "return_token_ids": True, "seed": turn}
        body["stream"] = False
        answer = sessions[turn % 2].post(url, json=body, timeout=60).json()
        prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        assert prompt[: len(known)] == known
        known = prompt + ids
        messages += [said(answer), user(f"Number {turn}, please. ü")]
    assert [one["reason"] for one in read(server, made)["turns"]] == ["first"] + [""] * 5


def test_texts_and_ids_go_on_without_messages(server: Server):
    made = make(server)

    def complete(prompt: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        answer = requests.post(f"{server.url}{made['path']}/completions", json=body, timeout=60)
        assert answer.ok, answer.text
        return answer.json()["choices"][0]

    first = complete("Hello")
    known = first["prompt_token_ids"] + first["token_ids"]
    second = complete("Hello" + first["text"] + " and more")
    assert second["prompt_token_ids"][: len(known)] == known
    by_ids = complete([7, 8, 9])
    known = [7, 8, 9] + by_ids["token_ids"]
    after = complete([*known, 11])
    assert after["prompt_token_ids"] == [*known, 11]
    found = read(server, made)["turns"]
    assert [(one["parent"], one["reason"]) for one in found] == [
        (None, "first"), (0, ""), (None, "history"), (2, "")
    ]  # fmt: skip
    many = requests.post(
        f"{server.url}{made['path']}/completions", json={"prompt": ["a", "b"]}, timeout=60
    )
    assert many.status_code == 400
    assert "expected one in a session" in many.text


def test_a_text_goes_on_after_the_stop_string_that_was_sampled(server: Server):
    made = make(server)

    def complete(prompt: str, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        url = f"{server.url}{made['path']}/completions"
        answer = requests.post(url, json=body | fields, timeout=60)
        assert answer.ok, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    texts = [
        server.post("/detokenize", {"tokens": [one]}).json()["prompt"]
        for one in complete("Hello")["token_ids"]
    ]
    # A token's whole text, which no earlier one contains.
    stop = next(
        text for index, text in enumerate(texts) if index > 2 and text not in "".join(texts[:index])
    )
    first = complete("Hello", stop=[stop])
    known = first["prompt_token_ids"] + first["token_ids"]
    assert stop not in first["text"]
    prompt = "Hello" + first["text"] + stop + " and more"
    second = complete(prompt)
    assert second["prompt_token_ids"][: len(known)] == known
    shown = server.post("/detokenize", {"tokens": second["prompt_token_ids"]}).json()["prompt"]
    assert shown == prompt
    # The client leaves out the stop string that the model has written.
    complete("Hello" + first["text"] + "~ other")
    found = read(server, made)["turns"]
    assert [(one["parent"], one["reason"]) for one in found[1:]] == [
        (None, "retry"), (1, ""), (None, "template"),
    ]  # fmt: skip


def test_requests_at_once_are_branches_and_all_end(server: Server):
    made = make(server)
    first = turn_of(server, made, HELLO)
    asked = [*HELLO, said(first), user(MORE)]
    answers: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(turn_of(server, made, asked, seed=1)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 8
    assert len({tuple(one["prompt_token_ids"]) for one in answers}) == 1
    found = read(server, made)["turns"][1:]
    assert [one["parent"] for one in found] == [0] * 8
    # The first one to end goes on from the parent, as far as anybody knows.
    assert [one["reason"] for one in found] == [""] + ["retry"] * 7
    assert [one["was_retried"] for one in samples(server, made)] == [True] * 7 + [False]


def test_the_end_of_a_session_ends_its_requests_and_no_others(server: Server):
    ended, other = make(server), make(server)
    answers: dict[str, requests.Response] = {}

    def ask(made: dict[str, Any]) -> None:
        body = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "n": 16}
        url = f"{server.url}{made['path']}/chat/completions"
        # Agents that are alike name their requests alike.
        headers = {"X-Request-ID": "task-3-turn-0"}
        answers[made["session_id"]] = requests.post(url, json=body, headers=headers, timeout=60)

    threads = [threading.Thread(target=ask, args=(made,)) for made in (ended, other)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.get("/requests").json()["num_requests"] == 2, 30)
    time.sleep(0.3)
    url = f"{server.url}/sessions/{ended['session_id']}"
    assert requests.delete(url, timeout=30).json() == {"deleted": 0}
    for thread in threads:
        thread.join(60)
    answer = answers[ended["session_id"]]
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_ended")
    whole = answers[other["session_id"]]
    assert whole.headers["X-Request-ID"].startswith("task-3-turn-0-")
    assert [one["finish_reason"] for one in whole.json()["choices"]] == ["length"] * 16
    for response in (requests.get(url, timeout=30), requests.delete(url, timeout=30)):
        assert response.json()["error"]["code"] == "session_ended"


@pytest.mark.parametrize(
    ("path", "field", "shape"),
    [
        ("/chat/completions", {"messages": HELLO}, "openai"),
        ("/messages", {"messages": HELLO[1:], "max_tokens": 2}, "anthropic"),
        ("/responses", {"input": "a"}, "openai"),
    ],
)
def test_an_unknown_session_is_an_error_of_the_dialect(
    server: Server, path: str, field: dict[str, Any], shape: str
):
    answer = requests.post(f"{server.url}/sessions/{'0' * 32}/v1{path}", json=field, timeout=30)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["type"] == ("not_found_error" if shape == "anthropic" else "invalid_request_error")
    assert "POST /sessions" in error["message"]


def test_what_a_session_cannot_keep_is_refused(server: Server):
    made = make(server)
    url = f"{server.url}{made['path']}"
    given = {"input": "a", "previous_response_id": "resp_unknown"}
    unknown = requests.post(f"{url}/responses", json=given, timeout=30)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "previous_response_id")
    body = {"messages": HELLO, "chat_template": "{{ messages }}"}
    template = requests.post(f"{url}/chat/completions", json=body, timeout=30)
    assert (template.status_code, template.json()["error"]["param"]) == (400, "chat_template")
    long = server.post("/sessions", {"metadata": {"a": "b" * 70_000}})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "metadata")
    key = {"Authorization": f"Bearer {made['key']}"}
    other = requests.post(
        f"{server.url}/generate/", json={"prompts": [[1]]}, headers=key, timeout=30
    )
    assert other.status_code == 401
    assert "the key of a session" in other.json()["error"]["message"]
