"""Agents that play in sessions, each to its end, and the checks of what their sessions remember."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.all.chaos.clients import ANSWER_TIMEOUT_S, IN_STREAM, Clients

NUM_AGENTS = 6
MAX_TURNS = 6
# The chances that a turn goes on from an earlier one than the last, and that it is sent twice.
FORK, RETRY = 0.15, 0.1
# A failed turn is sent again so often; then the agent ends.
MAX_ATTEMPTS = 8
# Of a completion, one more for each request of a session: no two say the same.
LEAST_TOKENS = 4
# Words or ids that a turn adds.
NUM_WORDS = 40
# Below the ids that stage faults.
MAX_ID = 40_000
WORDS = ("one", "two", "get", "set", "name", "path", "line", "file", "list", "type")
RETRY_S = 0.2
# Between turns, at most.
PAUSE_S = 0.3
LOGPROB = -1.5


@dataclass(eq=False)
class Played:
    """A turn whose end the agent has seen."""

    request: str
    # None: the first one.
    before: "Played | None"
    # Messages, or ids: what was sent, and what the next turn begins with.
    asked: list[Any]
    history: list[Any]
    prompt: list[int]
    ids: list[int]

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.ids


class Agent:
    """One agent at a time, each in a session of its own; by ids, which need no tokenizer."""

    route = "completions"

    def __init__(self, clients: Clients, url: str, seed: int):
        self._clients, self._url, self._chance = clients, url, random.Random(seed)
        self._may_leave = seed % 2 == 0

    async def run(self) -> None:
        """Plays sessions until the clients stop."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while self._clients.is_running:
                await self._play(http)

    async def _play(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._turns, self._failed, self._finished = list[Played](), list[str](), list[str]()
        # Whether each request was sent once, in a row.
        self._is_linear, self._num_sent = True, 0
        made = await self._ask("POST", "/sessions", {})
        if made is None:
            return
        self._base = made["path"]
        for _ in range(self._chance.randrange(2, MAX_TURNS + 1)):
            if not self._clients.is_running or not await self._play_turn():
                break
            await asyncio.sleep(self._chance.random() * PAUSE_S)
        session = f"/sessions/{made['session_id']}"
        problems = await self._check(session)
        for problem in problems:
            self._clients.add_error(f"agent: {problem}")
        self._clients.outcomes["agent: played" if not problems else "agent: wrong"] += 1
        self._clients.outcomes["agent: turns"] += len(self._turns)
        await self._end(session)

    # ---- turns -------------------------------------------------------------------------

    async def _play_turn(self) -> bool:
        """Sends a turn until its end is seen; returns whether it was."""
        before, asked = self._next()
        for _ in range(MAX_ATTEMPTS):
            if not self._clients.is_running:
                return False
            request = f"agent-{uuid.uuid4().hex}"
            attempt = Attempt(self, request, before, asked)
            await self._clients.request(attempt.send, self._http, may_leave=self._may_leave)
            if attempt.has_finished:
                self._finished.append(request)
            elif attempt.has_failed:
                self._failed.append(request)
            if attempt.played is not None:
                self._turns.append(attempt.played)
                return True
            self._is_linear = False
            await asyncio.sleep(RETRY_S)
        return False

    def _next(self) -> tuple[Played | None, list[Any]]:
        """The turn that the next one goes on from, and what the next one sends."""
        last = self._turns[-1] if self._turns else None
        draw = self._chance.random()
        if last is not None and draw < RETRY:
            self._is_linear = False
            return last.before, last.asked
        if last is not None and draw < RETRY + FORK:
            self._is_linear = False
            last = self._chance.choice(self._turns)
        return last, [*(last.history if last else []), *self.new()]

    def new(self) -> list[Any]:
        """What a turn adds; no two are equal."""
        return [self._chance.randrange(1, MAX_ID) for _ in range(NUM_WORDS)]

    def content(self, asked: list[Any]) -> dict[str, Any]:
        """The fields of a body with what a turn sends."""
        return {"prompt": asked}

    def history(self, asked: list[Any], whole: list[int], text: str) -> list[Any]:
        """What turns after this one begin with."""
        return whole

    def body(self, asked: list[Any]) -> dict[str, Any]:
        self._num_sent += 1
        return {
            **self.content(asked), "max_tokens": LEAST_TOKENS + self._num_sent,
            "return_token_ids": True, "stream": self._chance.random() < 0.4,
        }  # fmt: skip

    @property
    def url(self) -> str:
        return f"{self._url}{self._base}/{self.route}"

    @property
    def clients(self) -> Clients:
        return self._clients

    # ---- the end -----------------------------------------------------------------------

    async def _check(self, session: str) -> list[str]:
        """What the session remembers in another way than the agent has seen it."""
        while True:
            turns = await self._ask("GET", session)
            samples = await self._ask("GET", f"{session}/samples")
            again = await self._ask("GET", session)
            if turns is None or samples is None or again is None:
                return ["its session cannot be read"]
            # A request whose client has left may end meanwhile.
            if len(turns["turns"]) == len(again["turns"]):
                break
        found = list(problems_of(turns["turns"], samples["samples"], self._turns))
        names = names_of(turns["turns"])
        found += [f"{one} failed and has a turn" for one in self._failed if one in names]
        found += [f"{one} ended and has no turn" for one in self._finished if one not in names]
        if self._is_linear and self._turns:
            reasons = [one["reason"] for one in turns["turns"]]
            if reasons != ["first"] + [""] * (len(self._turns) - 1):
                found.append(f"a linear conversation has the reasons {reasons}")
        return found

    async def _end(self, session: str) -> None:
        await self._ask("DELETE", session)
        status, reply = await self._ask_once("GET", session)
        if status and (status, reply["error"]["code"]) != (410, "session_ended"):
            self._clients.add_error(f"agent: a deleted session answers {status} {reply}")

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        """The answer of a route that faults may hit, asked until it answers; None: it never does."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            status, reply = await self._ask_once(method, path, body)
            # An earlier DELETE may have ended it, whose answer was lost.
            if status == 200 or (method == "DELETE" and status == 410):
                return reply
            if status:
                self._clients.check_error(status, reply)
            await asyncio.sleep(RETRY_S)
        self._clients.add_error(f"agent: {method} {path} has no answer")
        return None

    async def _ask_once(
        self, method: str, path: str, body: Any = None
    ) -> tuple[int, dict[str, Any]]:
        """Status 0: the connection broke."""
        try:
            async with self._http.request(method, self._url + path, json=body) as answer:
                text = await answer.read()
                return answer.status, json.loads(text or b"{}")
        except (aiohttp.ClientError, OSError) as error:
            if not self._clients.may_break:
                self._clients.add_error(f"agent: {method} {path} lost: {error!r}")
            return 0, {}


class ChatAgent(Agent):
    """By messages, which the session recognizes."""

    route = "chat/completions"

    def new(self) -> list[Any]:
        words = [str(len(self._turns)), *self._chance.choices(WORDS, k=NUM_WORDS)]
        said = {"role": "user", "content": " ".join(words)}
        return [said] if self._turns else [{"role": "system", "content": "Be brief."}, said]

    def content(self, asked: list[Any]) -> dict[str, Any]:
        return {"messages": asked}

    def history(self, asked: list[Any], whole: list[int], text: str) -> list[Any]:
        return [*asked, {"role": "assistant", "content": text}]


class Attempt:
    """One request of a turn."""

    def __init__(self, agent: Agent, request: str, before: Played | None, asked: list[Any]):
        self._agent, self._request = agent, request
        self._before, self._asked = before, asked
        self._prompt, self._ids, self._text = list[int](), list[int](), ""
        self.played: Played | None = None
        # Whether the server has answered that it failed, and that its completion has ended. A stream may
        # fail after that: the worker is lost before it has said how the job ended.
        self.has_failed = self.has_finished = False

    async def send(self, http: aiohttp.ClientSession) -> str:
        body, headers = self._agent.body(self._asked), {"X-Request-Id": self._request}
        async with http.post(self._agent.url, json=body, headers=headers) as answer:
            if answer.status != 200:
                return self._fail(answer.status, await answer.json(), is_stream=body["stream"])
            if body["stream"]:
                return await self._read(answer)
            self._take(await answer.json())
        return self._end()

    async def _read(self, answer: aiohttp.ClientResponse) -> str:
        """Reads a stream."""
        has_ended = False
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                has_ended = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return self._fail(IN_STREAM, chunk, is_stream=True)
                self._take(chunk)
        if not has_ended:
            if not self._agent.clients.may_break:
                self._agent.clients.add_error("agent: a stream without an end")
            return "connection broken"
        return self._end()

    def _take(self, part: dict[str, Any]) -> None:
        """A whole answer, or a chunk of a stream."""
        self._prompt = part.get("prompt_token_ids") or self._prompt
        for choice in part["choices"]:
            self._prompt = choice.get("prompt_token_ids") or self._prompt
            self._ids += choice.get("token_ids") or []
            said = choice.get("message") or choice.get("delta") or {}
            self._text += said.get("content") or ""
            self.has_finished |= bool(choice["finish_reason"])

    def _fail(self, status: int, reply: dict[str, Any], *, is_stream: bool) -> str:
        self.has_failed = True
        who = "agent's stream: " if is_stream else "agent: "
        return who + self._agent.clients.check_error(status, reply)

    def _end(self) -> str:
        known = self._before.whole if self._before else []
        if self._prompt[: len(known)] != known or len(self._prompt) <= len(known):
            self._agent.clients.add_error(
                f"agent: the prompt of {self._request} does not go on from {len(known)} ids"
            )
        history = self._agent.history(self._asked, self._prompt + self._ids, self._text)
        self.played = Played(
            self._request, self._before, self._asked, history, self._prompt, self._ids
        )
        return "agent: a turn"


def names_of(turns: list[dict[str, Any]]) -> list[str]:
    """The agent's ids of the turns' requests, to which the server adds."""
    return [one["request_id"].rpartition("-")[0] for one in turns]


def problems_of(
    turns: list[dict[str, Any]], samples: list[dict[str, Any]], played: list[Played]
) -> Iterator[str]:
    """What a session says in another way than the agent has seen.

    Args:
        turns: of `GET /sessions/{id}`.
        samples: of `GET /sessions/{id}/samples`.
    """
    names = names_of(turns)
    for name in set(names):
        if names.count(name) > 1:
            yield f"{name} has {names.count(name)} turns"
    reasons = {one["reason"] for one in turns}
    if not reasons <= {"first", "", "fork", "retry"}:
        yield f"branches for {reasons}"
    for one in played:
        if one.request not in names:
            # `Agent._check` says so.
            continue
        number = names.index(one.request)
        parent = names.index(one.before.request) if one.before else None
        if turns[number]["parent"] != parent:
            said = [(one["parent"], one["reason"], one["completion_tokens"]) for one in turns]
            yield (
                f"turn {number} goes on from {turns[number]['parent']}, expected {parent}: {said}"
            )
        yield from problems_of_samples(number, one, samples)
    counted = sum(sum(one["loss_mask"]) for one in samples)
    sampled = sum(one["completion_tokens"] for one in turns)
    if counted != sampled:
        yield f"{counted} tokens count for the loss, {sampled} were sampled"


def problems_of_samples(
    number: int, played: Played, samples: list[dict[str, Any]]
) -> Iterator[str]:
    """The turn is in samples with its ids, and counts for the loss in one of them."""
    begin, end = len(played.prompt), len(played.whole)
    holders = [one for one in samples if number in one["turns"]]
    for one in holders:
        if one["ids"][:end] != played.whole:
            yield f"a sample has other ids of turn {number}"
        if one["logprobs"][begin:end] != [LOGPROB] * (end - begin):
            yield f"a sample has the log-probabilities {one['logprobs'][begin:end]} of turn {number}"
        index = one["turns"].index(number)
        if one["weight_versions"][index][1] != begin:
            yield f"a sample has the versions {one['weight_versions']}, turn {number} begins at {begin}"
    masks = sorted(one["loss_mask"][begin:end] for one in holders)
    expected = [[0] * (end - begin)] * (len(holders) - 1) + [[1] * (end - begin)]
    if masks != expected:
        yield f"turn {number} counts for the loss as {masks}"
