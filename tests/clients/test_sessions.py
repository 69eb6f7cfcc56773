"""Sessions of our client, and agents that run in them, over real vLLM."""

import asyncio
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import numpy as np
import openai
import pytest

from harness.servers import Server, wait_until
from titopool import (
    AsyncClient,
    Client,
    SessionSample,
    pad_rollouts,
    run_agents,
    run_agents_async,
)
from titopool.client.failures import ConnectionLost
from titopool.errors import InvalidRequest, SessionEnded, SessionNotFound
from titopool.rollouts import agent_commands, agents

SAMPLING: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}
EXTRA = {"return_token_ids": True, "ignore_eos": True}
TIMEOUT_S = 120.0
NUM_TURNS = 3


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout_s=TIMEOUT_S) as client:
        yield client


def first_messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def ask(package: openai.OpenAI, messages: list[dict[str, Any]], **options: Any) -> Any:
    """An answer, after which the conversation goes on."""
    answer = package.chat.completions.create(
        model=package.models.list().data[0].id, messages=messages, logprobs=True,
        extra_body=EXTRA, **{**SAMPLING, **options},
    )  # fmt: skip
    content = answer.choices[0].message.content
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
    return answer


def talk(base_url: str, api_key: str, text: str, num_turns: int = NUM_TURNS) -> list[Any]:
    """An agent that knows nothing of titopool; returns the answers that it got."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as package:
        messages = first_messages(text)
        return [ask(package, messages) for _ in range(num_turns)]


def check_linear(sample: SessionSample, answers: list[Any]) -> None:
    """The sample is the prompt and completion of each answer, exactly."""
    end = 0
    is_sampled = np.zeros(len(sample.ids), bool)
    for answer in answers:
        (choice,) = answer.choices
        prompt, ids = answer.prompt_token_ids, choice.token_ids
        start, end = len(prompt), len(prompt) + len(ids)
        assert sample.ids[:end].tolist() == [*prompt, *ids]
        is_sampled[start:end] = True
        logprobs = [one.logprob for one in choice.logprobs.content]
        assert sample.logprobs[start:end] == pytest.approx(logprobs, abs=1e-6)
        assert len(logprobs) == len(ids) > 0
    assert end == len(sample.ids)
    assert np.array_equal(sample.loss_mask == 1, is_sampled)
    assert not sample.logprobs[~is_sampled].any()
    assert sample.prompt_length == len(answers[0].prompt_token_ids)
    assert sample.reasons == ("first", *[""] * (len(answers) - 1))
    assert sample.finish_reasons == ("length",) * len(answers)
    assert (sample.turns, sample.was_retried) == (tuple(range(len(answers))), False)
    assert [index for _, index in sample.weight_versions] == [
        len(answer.prompt_token_ids) for answer in answers
    ]


def has_ended(server: Server, session_id: str) -> bool:
    return server.get(f"/sessions/{session_id}").status_code == 410


def test_a_linear_conversation_is_one_sample(server: Server, client: Client):
    with client.session({"task": [1, "ü"]}) as session:
        assert session.base_url == f"{server.url}/sessions/{session.id}/v1"
        assert session.api_key == f"session:{session.id}"
        assert session.samples() == []
        answers = talk(session.base_url, session.api_key, "Hello, ü!")
        read = session.read()
        (sample,) = session.samples()
        copy = pickle.loads(pickle.dumps(session))
        assert copy.read() == session.read()
    check_linear(sample, answers)
    types = [array.dtype for array in (sample.ids, sample.loss_mask, sample.logprobs)]
    assert types == [np.int32, np.uint8, np.float32]
    assert read.metadata == {"task": [1, "ü"]}
    assert (read.num_branches, [turn.parent for turn in read.turns]) == (1, [None, 0, 1])
    assert read.usage.completion_tokens == NUM_TURNS * SAMPLING["max_tokens"]
    assert has_ended(server, session.id)
    with pytest.raises(SessionEnded):
        session.samples()
    with pytest.raises(SessionEnded):
        copy.read()
    session.end()


def test_the_key_alone_opens_the_session(server: Server, client: Client):
    with client.session() as session:
        answers = talk(server.url + "/v1", session.api_key, "Hello")
        (sample,) = session.samples()
    check_linear(sample, answers)


def test_errors_of_sessions_name_their_cause(client: Client):
    with pytest.raises(InvalidRequest, match="metadata"):
        client.session({"text": "a" * 70_000})
    with pytest.raises(InvalidRequest, match=r"metadata\.reward"):
        client.session({"reward": float("nan")})
    with pytest.raises(SessionNotFound), client.session() as session:
        session.session._path = "/sessions/none"
    session = client.session()
    session.session._path = "/sessions/none"
    with pytest.raises(ZeroDivisionError), session:
        raise ZeroDivisionError


def test_the_asynchronous_client_s_session(server: Server):
    async def run() -> None:
        async with AsyncClient(server.url, timeout_s=TIMEOUT_S) as client:
            async with await client.session({"task": 7}) as session:
                answers = await asyncio.to_thread(talk, session.base_url, session.api_key, "Hello")
                check_linear(*await session.samples(), answers)
                assert (await session.read()).metadata == {"task": 7}
            with pytest.raises(SessionEnded):
                await session.read()

    asyncio.run(run())


class Agent:
    """Talks, raises, hangs, exits or asks twice, as its task says."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.hanging: list[str] = []
        self.release = threading.Event()

    def __call__(self, base_url: str, api_key: str, task: dict[str, str]) -> str:
        if task["kind"] == "exit":
            sys.exit(3)
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as package:
            messages = first_messages(task["text"])
            if task["kind"] == "twice":
                ask(package, first_messages(task["text"]), seed=1)
                ask(package, messages, seed=2)
            else:
                self.answers[api_key] = [ask(package, messages) for _ in range(NUM_TURNS)]
            if task["kind"] == "raise":
                raise LookupError("no such tool")
            if task["kind"] == "hang":
                self.release.wait(TIMEOUT_S)
                try:
                    ask(package, messages)
                except openai.APIStatusError as error:
                    self.hanging.append(error.code)
        return task["text"]


def test_an_agent_that_fails_or_hangs_costs_only_its_own_run(server: Server, client: Client):
    kinds = ["talk", "raise", "hang", "exit", "twice", "talk"]
    tasks = [{"kind": kind, "text": f"{kind} {index}"} for index, kind in enumerate(kinds)]
    agent = Agent()
    try:
        runs = run_agents(client, tasks, agent=agent, n=2, agent_timeout_s=30)
    finally:
        agent.release.set()
    assert [run.task_index for run in runs] == [index for index in range(len(kinds)) for _ in "ab"]
    assert len({run.session_id for run in runs}) == len(runs)
    errors = {"raise": LookupError, "hang": TimeoutError, "exit": RuntimeError}
    for run in runs:
        task = tasks[run.task_index]
        expected = errors.get(task["kind"], type(None))
        assert type(run.error) is expected, run.error
        assert run.value == (None if run.error else task["text"])
        assert has_ended(server, str(run.session_id))
        if task["kind"] == "exit":
            assert run.samples == ()
        elif task["kind"] == "twice":
            (sample,) = run.samples
            assert (sample.reasons, sample.was_retried) == (("retry",), False)
        else:
            (sample,) = run.samples
            check_linear(sample, agent.answers[f"session:{run.session_id}"])
    # The threads that hung cannot go on in a session that has ended.
    wait_until(lambda: agent.hanging == ["session_ended"] * 2, TIMEOUT_S)
    played = [one for run in runs if run.error is None for one in run.sequences()]
    batch = pad_rollouts(played, pad_id=0)
    assert len(played) == 6
    for row, one in enumerate(played):
        assert batch.ids_of(row).tolist() == one.ids.tolist()
        assert (one.weight_versions[one.loss_mask == 1] >= 0).all()
        assert (one.weight_versions[one.loss_mask == 0] == -1).all()
    assert (batch.logprobs[batch.loss_mask == 1] < 0).all()
    assert not batch.logprobs[batch.loss_mask == 0].any()


def test_retried_samples_come_on_request(client: Client):
    task = {"kind": "twice", "text": "Again"}
    (run,) = run_agents(client, [task], agent=Agent(), with_retried=True)
    assert [one.was_retried for one in run.samples] == [True, False]


COMMAND = r"""
import json, os, signal, subprocess, sys, time, urllib.request

task = json.loads(os.environ["TITOPOOL_TASK"])
assert "TITOPOOL_API_KEY" not in os.environ
if task["kind"] == "anthropic":
    import anthropic

    package = anthropic.Anthropic(max_retries=0)
    messages = [{"role": "user", "content": task["text"]}]
    for _ in range(3):
        answer = package.messages.create(
            model=task["model"], max_tokens=8, messages=messages, extra_body={"ignore_eos": True}
        )
        text = "".join(block.text for block in answer.content)
        messages += [
            {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}
        ]
    print("done")
    sys.exit()
body = {"messages": [{"role": "user", "content": task["text"]}], "max_tokens": 4}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
urllib.request.urlopen(request, timeout=60).read()
if task["kind"] == "fail":
    sys.exit("it went wrong")
if task["kind"] == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "300"])
    with open(task["file"], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(300)
while task["kind"] == "flood":
    print("x" * 10000)
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # What nobody has waited for yet.
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_commands_run_in_sessions(
    server: Server, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agent_commands, "TERMINATE_S", 0.3)
    monkeypatch.setattr(agent_commands, "MAX_OUTPUT_BYTES", 2**20)
    monkeypatch.setenv("TITOPOOL_API_KEY", "secret")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "another server's")
    shared = {"file": str(tmp_path / "pids"), "model": client.info().model}
    tasks = [
        {"kind": kind, "text": f"Hello, {kind}", **shared}
        for kind in ("anthropic", "fail", "hang", "flood", "plain")
    ]
    runs = run_agents(
        client, tasks, command=[sys.executable, "-c", COMMAND], concurrency=3, agent_timeout_s=30
    )
    told, failed, hung, flooding, plain = runs
    assert told.value == "done\n", getattr(told.error, "stderr", told.error)
    (sample,) = told.samples
    assert sample.reasons == ("first", "", "")
    assert sample.loss_mask.sum() == 24
    assert isinstance(failed.error, CalledProcessError)
    assert (failed.error.returncode, failed.error.stderr) == (1, "it went wrong\n")
    assert isinstance(hung.error, TimeoutError)
    assert isinstance(flooding.error, RuntimeError)
    assert plain.value == "", plain.error
    for run in runs:
        assert len(run.samples) == 1
        assert has_ended(server, str(run.session_id))
    pids = [int(one) for one in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(is_running, pids)), TIMEOUT_S)


def test_a_command_of_the_task(client: Client):
    runs = run_agents(client, [["echo", "a"], ["no-such-command"]], command=lambda task: task)
    assert runs[0].value == "a\n"
    assert isinstance(runs[1].error, FileNotFoundError)
    assert [run.samples for run in runs] == [(), ()]
    assert run_agents(client, [], command=["true"]) == []


def test_a_cancel_ends_coroutines_commands_and_sessions(server: Server, tmp_path: Path):
    opened: list[str] = []
    ended: list[str] = []

    async def never(base_url: str, api_key: str, task: Any) -> None:
        opened.append(api_key)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(api_key)

    async def run() -> None:
        async with AsyncClient(server.url, timeout_s=TIMEOUT_S) as client:
            file = tmp_path / "pid"
            playing = [
                asyncio.create_task(
                    run_agents_async(client, [1, 2, 3], agent=never, concurrency=2)
                ),
                asyncio.create_task(
                    run_agents_async(
                        client, [0], command=["sh", "-c", f"echo $$ >{file}; sleep 300"]
                    )
                ),
            ]
            end = time.monotonic() + TIMEOUT_S
            while len(opened) < 2 or not (file.exists() and file.read_text()):
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            for one in playing:
                one.cancel()
            found = await asyncio.gather(*playing, return_exceptions=True)
            assert [type(one) for one in found] == [asyncio.CancelledError] * 2
        assert not is_running(int(file.read_text()))

    asyncio.run(run())
    assert sorted(ended) == sorted(opened)
    assert len(opened) == 2
    assert all(has_ended(server, one.removeprefix("session:")) for one in opened)


def test_an_interrupt_ends_all_sessions_before_it_is_raised(server: Server, client: Client):
    opened: list[str] = []

    async def never(base_url: str, api_key: str, task: Any) -> None:
        opened.append(api_key.removeprefix("session:"))
        if len(opened) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.Event().wait()

    # A shell that runs the tests in its background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_agents(client, [1], agent=never, n=3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(opened) == 3
    assert all(has_ended(server, one) for one in opened)


def test_a_stopped_client_runs_no_agents(client: Client):
    client.stop()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        run_agents(client, [1], agent=talk)
    assert time.monotonic() - began < agents.GRACE_S


def test_coroutines_run_in_the_loop_of_the_caller_and_may_refuse_a_cancel(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agents, "GRACE_S", 0.3)
    threads = set()
    is_over = asyncio.Event()

    async def agent(base_url: str, api_key: str, task: str) -> str:
        threads.add(threading.current_thread())
        if task == "cancelled":
            raise asyncio.CancelledError
        while task == "stubborn" and not is_over.is_set():
            try:
                await is_over.wait()
            except asyncio.CancelledError:
                pass
        return task

    async def run() -> None:
        async with AsyncClient(server.url, timeout_s=TIMEOUT_S) as client:
            tasks = ["cancelled", "stubborn", "good"]
            runs = await run_agents_async(client, tasks, agent=agent, agent_timeout_s=0.5)
            is_over.set()
        errors = [type(one.error) for one in runs]
        assert errors == [RuntimeError, TimeoutError, type(None)]
        assert runs[2].value == "good"

    asyncio.run(run())
    assert threads == {threading.main_thread()}


def test_without_a_server_each_run_has_the_error():
    with Client("http://127.0.0.1:9", timeout_s=10) as client:
        runs = run_agents(client, [1, 2], agent=talk)
    assert [(run.task_index, type(run.error)) for run in runs] == [
        (0, ConnectionLost),
        (1, ConnectionLost),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"agent": talk, "command": ["true"]},
        {"agent": talk, "n": 0},
        {"agent": talk, "agent_timeout_s": 0},
        {"command": []},
        {"command": "true"},
        {"command": lambda task: "true"},
    ],
)
def test_unusable_arguments_are_refused(options: dict[str, Any]):
    with Client("http://127.0.0.1:9") as client, pytest.raises(ValueError, match="expected"):
        run_agents(client, [json.loads("1")], **options)
