"""`titopool.Client` without a server of titopool: imports, bodies, and answers of others."""

import asyncio
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from harness.servers import environment, free_port
from tests.kit.peers.canned_server import canned_server, response
from titopool import AsyncClient, Client, TitopoolError
from titopool.client.answers import Answer
from titopool.client.bodies import Options, chats_batch, pieces, prompts_batch
from titopool.client.failures import ConnectionLost, IncompatibleServer, TimedOut, UnexpectedAnswer
from titopool.errors import ERRORS_BY_CODE, Conflict, InvalidRequest, ModelNotFound, NoReadyWorker
from titopool.release import RELEASE, are_compatible

OPTIONS = Options(1, 16, 1.0, 0, None, None, {})
ABSENT = (
    "vllm", "flask", "torch", "gevent", "gunicorn", "transformers", "zmq", "psutil",
    "prometheus_client", "orjson", "PIL", "tqdm",
)  # fmt: skip


def error_body(code: str, message: str = "no") -> bytes:
    return b'{"error": {"message": "%s", "code": "%s"}}' % (message.encode(), code.encode())


BUSY = response("503 No", error_body("no_ready_worker"), "Retry-After: 1")


def test_the_client_works_where_the_server_s_packages_are_absent(tmp_path):
    program = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
import titopool
before = set(sys.modules)
assert "aiohttp" not in before and "numpy" not in before, "not lazy"
from titopool import AsyncClient, Client, Completion, PromptResult, Score, TitopoolError
with Client(sys.argv[1]) as client:
    try:
        client.generate([[1, 2]])
    except TitopoolError as error:
        print(error.code)
"""
    with canned_server(response("429 Full", error_body("queue_full"))) as url:
        ended = subprocess.run(
            [sys.executable, "-c", program, url],
            env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "queue_full\n"), ended.stderr


@pytest.mark.parametrize("code", sorted(set(ERRORS_BY_CODE) - {"config_error"}))
def test_each_error_of_the_server_is_raised_as_its_class(code: str):
    sent = ERRORS_BY_CODE[code]
    answer = response(f"{sent.status} No", error_body(code), "Retry-After: 7")
    with canned_server(answer) as url, Client(url) as client, pytest.raises(sent) as caught:
        client.tokenize("a")
    error = caught.value
    assert (type(error), error.status, error.code, error.retry_after_s) == (
        sent, sent.status, code, 7,
    )  # fmt: skip


@pytest.mark.parametrize(
    "status, kind",
    [
        (400, InvalidRequest), (404, ModelNotFound), (409, Conflict), (418, InvalidRequest),
        (500, TitopoolError), (502, TitopoolError), (503, NoReadyWorker),
    ],
)  # fmt: skip
def test_an_unknown_code_becomes_the_nearest_error(status: int, kind: type[TitopoolError]):
    with (
        canned_server(response(f"{status} No", error_body("brand_new", "why"))) as url,
        Client(url) as client,
        pytest.raises(kind, match="why") as caught,
    ):
        client.tokenize("a")
    # `raises` takes subclasses, too: an unknown code of 503 does not mean that the model changed.
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.code) == (status, "brand_new")


@pytest.mark.parametrize(
    "answer, kind, words",
    [
        pytest.param(response("200 OK", b"hi", release=None), UnexpectedAnswer, "X-Titopool-Version",
                     id="no-release"),
        pytest.param(response("502 Bad", b"<html>", release=None), UnexpectedAnswer,
                     "status 502 with '<html>'", id="proxy"),
        pytest.param(response("200 OK", b"{}", release="7.1.0"), IncompatibleServer,
                     r"pip install 'titopool==7\.\*'", id="other-release"),
        pytest.param(response("200 OK", b"[]"), UnexpectedAnswer, "TokenizeAnswer", id="other-json"),
        pytest.param(response("302 Found", b"", "Location: /x"), UnexpectedAnswer, "302",
                     id="redirect"),
        pytest.param(b"SSH-2.0\r\n", UnexpectedAnswer, "over HTTP", id="not-http"),
        pytest.param(b"", ConnectionLost, "connection failed", id="closed"),
        pytest.param(response("200 OK", b'{"tokens": [1]}')[:-4], ConnectionLost, "failed",
                     id="cut-off"),
        pytest.param(None, TimedOut, r"within 1 s \(timeout_s\)", id="silent"),
    ],
)  # fmt: skip
def test_what_is_no_answer_of_titopool_is_named(
    answer: bytes | None, kind: type[TitopoolError], words: str
):
    with (
        canned_server(answer) as url,
        Client(url, timeout_s=60 if answer is not None else 1) as client,
        pytest.raises(kind, match=words),
    ):
        client.tokenize("a")


def test_a_server_that_is_not_there_is_named():
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url) as client, pytest.raises(ConnectionLost, match=url):
        client.tokenize("a")
    with Client(url) as client, pytest.raises(TimedOut, match="no server answers"):
        client.wait_until_ready(0.1)


def test_binary_answers_of_another_shape_are_refused():
    answer = response("200 OK", b"\x80", "Content-Type: application/msgpack")
    with (
        canned_server(answer) as url,
        Client(url) as client,
        pytest.raises(UnexpectedAnswer, match="binary answer to 1 prompts"),
    ):
        client.generate([[1, 2]])


@pytest.mark.parametrize("first", [BUSY, b""], ids=["busy", "closed"])
def test_nothing_is_repeated_without_a_key(first: bytes):
    with (
        canned_server(first, response("200 OK")) as url,
        Client(url) as client,
        pytest.raises(TitopoolError, match=r"no|failed"),
    ):
        client.generate([[1, 2]])


def test_a_request_with_a_key_is_repeated_when_the_server_says_when():
    body = {
        "prompt_ids": [None],
        "completion_ids": [np.array([7], "<i4").tobytes()],
        "finish_reasons": ["length"],
        "weight_versions": [[[3, 0]]],
        "num_cached_tokens": [0],
    }
    answer = response("200 OK", msgspec.msgpack.encode(body), "Content-Type: application/msgpack")
    with canned_server(BUSY, b"", answer) as url, Client(url) as client:
        (result,) = client.generate([1, 2], idempotent=True)
    assert result.prompt_ids.tolist() == [1, 2]
    assert result.completions[0].weight_versions == ((3, 0),)
    refusal = response("503 No", error_body("no_ready_worker"))
    with (
        canned_server(refusal, answer) as url,
        Client(url) as client,
        pytest.raises(NoReadyWorker),
    ):
        client.generate([1, 2], idempotent=True)


def test_the_requests_of_a_batch_have_ids_of_their_own_and_an_abort_reaches_all(
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("tqdm")
    sent: list[tuple[str | None, str | None]] = []
    aborted: list[list[str]] = []
    body = {
        "prompt_ids": [None],
        "completion_ids": [np.array([7], "<i4").tobytes()],
        "finish_reasons": ["length"],
        "weight_versions": [[[0, 0]]],
        "num_cached_tokens": [0],
    }
    kind = {"x-titopool-version": RELEASE, "content-type": "application/msgpack"}

    async def once(
        self: AsyncClient, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> Answer:
        if path == "/generate/":
            sent.append((headers.get("X-Request-Id"), headers.get("Idempotency-Key")))
            while len(aborted) < 2:
                await asyncio.sleep(0.01)
        else:
            aborted.append(msgspec.json.decode(content)["request_ids"])
        return Answer(200, kind, msgspec.msgpack.encode(body), "")

    async def main() -> None:
        client = AsyncClient("http://127.0.0.1:1")
        run = asyncio.create_task(
            client.generate([[1]] * 3, progress=True, request_id="step", idempotent="key")
        )
        while len(sent) < 3:
            await asyncio.sleep(0)
        await client.abort(["other", "step"])
        await client.abort(["other"])
        assert len(await run) == 3
        await client.abort(["step"])
        with pytest.raises(InvalidRequest, match="request_id"):
            await client.generate([[1]], progress=True, request_id="a" * 255)

    monkeypatch.setattr(AsyncClient, "_once", once)
    asyncio.run(main())
    assert sent == [("step-0", "key-0"), ("step-1", "key-1"), ("step-2", "key-2")]
    assert aborted == [["other", "step", "step-0", "step-1", "step-2"], ["other"], ["step"]]


def test_closing_ends_the_calls_of_other_threads():
    with canned_server(None) as url:
        client = Client(url)
        ended = threading.Event()

        def call() -> None:
            try:
                client.tokenize("a")
            except BaseException:
                ended.set()

        thread = threading.Thread(target=call)
        thread.start()
        while client._thread is None:
            pass
        client.close()
        assert ended.wait(60)
        thread.join()


def test_the_end_of_an_async_client_s_block_has_closed_its_connections():
    async def story() -> bool:
        async with AsyncClient(f"http://127.0.0.1:{free_port()}", timeout_s=5) as client:
            with pytest.raises(TitopoolError):
                await client.generate([[1]])
            ((session, _),) = client._sessions._open.values()
            assert not session.closed
        return bool(session.closed)

    assert asyncio.run(story())


def test_releases_work_together_within_a_series():
    assert are_compatible("0.1.0", "0.1.9")
    assert not are_compatible("0.1.0", "0.2.0")
    assert are_compatible("1.2", "1.10.3")
    assert not are_compatible("1.9", "2.0")
    assert are_compatible(RELEASE, RELEASE)


# ---- bodies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts, items",
    [
        ("hello", ["hello"]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.int32(1), np.int32(2)], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], (2, 3), np.array([4])], [[1], [2, 3], [4]]),
        ({"prompt_token_ids": np.array([1])}, [{"prompt_token_ids": [1]}]),
        ([{"prompt_token_ids": [1], "cache_salt": "s"}],
         [{"prompt_token_ids": [1], "cache_salt": "s"}]),
        ([], []),
    ],
)  # fmt: skip
def test_prompts_of_each_kind(prompts, items):
    assert prompts_batch(prompts, None, OPTIONS).items == items


def test_images_are_encoded_where_they_stand():
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2), "red")
    one = prompts_batch([1], image, OPTIONS)
    assert one.images is not None
    assert one.images[0][0].startswith("iVBOR")
    several = prompts_batch([[1], [2], [3]], [[image, b"x"], None, "eA=="], OPTIONS)
    assert several.images is not None
    assert several.images[1:] == [None, ["eA=="]]
    assert several.images[0][1] == "eA=="
    object_prompt = {"prompt_token_ids": [1], "multi_modal_data": {"image": image}}
    (item,) = prompts_batch(object_prompt, None, OPTIONS).items
    assert item["multi_modal_data"]["image"] == one.images[0]
    part = {"type": "image", "image": image}
    message = {"role": "user", "content": [part, {"type": "text", "text": "what?"}]}
    (chat,) = chats_batch([message], None, None, OPTIONS).items
    assert chat[0]["content"][0] == {"type": "image", "image": one.images[0][0]}
    assert part["image"] is image
    with pytest.raises(InvalidRequest, match="one entry for each of 2 prompts, got 1"):
        prompts_batch([[1], [2]], [image], OPTIONS)
    with pytest.raises(InvalidRequest, match="expected a PIL image"):
        prompts_batch([1], object(), OPTIONS)


def test_errors_of_a_part_of_a_batch_name_places_in_the_batch():
    batch = prompts_batch([[1]] * 5, None, OPTIONS)
    assert batch.moved("prompts[1][17]: expected …", 3) == "prompts[4][17]: expected …"
    assert list(pieces(5, 64)) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert list(pieces(130, 64)) == [(start, min(start + 3, 130)) for start in range(0, 130, 3)]


@pytest.mark.parametrize(
    "arguments, words",
    [({"request_id": "a b"}, "request_id"), ({"session_id": "ä"}, "session_id"),
     ({"seed": object()}, "JSON")],
)  # fmt: skip
def test_arguments_that_cannot_be_sent_are_refused(arguments, words: str):
    with Client("http://127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=words):
        client.generate([1], **arguments)
    with pytest.raises(InvalidRequest, match="base_url"):
        Client("localhost:8000")


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "arguments, place",
    [
        ({"temperature": NAN}, "temperature"),
        ({"seed": NAN}, "seed"),
        ({"presence_penalty": INF}, "presence_penalty"),
        ({"min_p": np.float32(NAN)}, "min_p"),
        ({"logit_bias": {"5": -INF}}, r"logit_bias\.5"),
        ({"stop_token_ids": [1, NAN]}, r"stop_token_ids\[1\]"),
        ({"mm_processor_kwargs": {"size": np.array([[1.0, INF]])}}, r"mm_processor_kwargs\.size\[0\]\[1\]"),
        ({"prompts": [[1], [2, NAN]]}, r"prompts\[1\]\[1\]"),
    ],
)  # fmt: skip
def test_numbers_that_json_lacks_are_refused_by_name(arguments, place: str):
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(InvalidRequest, match=f"^{place}: expected a finite number") as caught,
    ):
        client.generate(**{"prompts": [1], **arguments})
    assert caught.value.param == place.partition("\\")[0]


def test_other_calls_refuse_numbers_that_json_lacks():
    with Client("http://127.0.0.1:1") as client:
        message = {"role": "assistant", "tool_calls": [{"function": {"arguments": {"x": NAN}}}]}
        with pytest.raises(InvalidRequest, match=r"^messages\[0\]\[0\]\.tool_calls\[0\]\..*x: "):
            client.chat([message])
        with pytest.raises(InvalidRequest, match=r"^lease_s: expected a finite number"):
            client.pause(lease_s=INF)
        with pytest.raises(InvalidRequest, match=r"^timeout_s: expected at least 0, got nan"):
            client.wait_until_ready(NAN)
