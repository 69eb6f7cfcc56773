"""`raw_logprobs`: the model's own log-probabilities beside those of the sampler."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from app.outputs.token_arrays import raw_logprobs
from harness.servers import Server, running_server
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models import reference
from titopool import Client
from titopool.errors import ConfigError, GenerationFailed
from titopool.settings.sources import from_command_line
from titopool.wire.messages import Completion, Logprobs
from workers.engine.start.options import parse_options
from workers.engine.start.raw_logprobs import RUNNER_VARIABLE, check_raw_logprobs, choose_runner

PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7], [11, 12, 13, 14]]
NUM_TOKENS = 10
# Each of them makes the sampler's distribution another than the model's.
PROCESSED: dict[str, Any] = {
    "n": 2, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3,
    "generation_kwargs": {"ignore_eos": True, "presence_penalty": 0.5, "logit_bias": {"5": -20}},
}  # fmt: skip


@pytest.fixture(scope="module")
def raw_server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("raw") / "log"
    with running_server(tiny_model, "--raw-logprobs", *ENGINE_OPTIONS, log=log) as server:
        yield server


def expected_raw(folder: str, prompts: list[list[int]], completions: list[Any]) -> list[np.ndarray]:
    """Of transformers in float32, without the sampler's options."""
    n = len(completions) // len(prompts)
    rows = []
    for index, ids in enumerate(completions):
        found = reference.logprobs(folder, prompts[index // n], list(ids))
        rows.append(np.array([float(row[one]) for row, one in zip(found, ids, strict=True)]))
    return rows


@pytest.mark.parametrize("options", [PROCESSED, {"temperature": 0.0}], ids=["sampled", "greedy"])
def test_raw_are_the_model_s_and_processed_the_sampler_s(raw_server, tiny_model, options):
    answer = raw_server.generate(PROMPTS, max_tokens=NUM_TOKENS, raw_logprobs=True, **options)
    expected = expected_raw(tiny_model, PROMPTS, answer["completion_ids"])
    for raw, own, entries in zip(answer["raw_logprobs"], expected, answer["logprobs"], strict=True):
        processed = np.array([one[0] for one in entries])
        assert np.abs(np.array(raw) - own).max() < 1e-3
        assert (np.abs(processed - own).max() < 1e-3) == (options is not PROCESSED)


def test_requests_of_one_step_have_their_own(raw_server, tiny_model):
    """They ask for 0, 3 and 7 of the best, which share the engine's steps."""

    def ask(index: int) -> dict[str, Any]:
        found: dict[str, Any] = raw_server.generate(
            [PROMPTS[index]], max_tokens=40, n=4, logprobs=(0, 3, 7)[index], temperature=0.8,
            raw_logprobs=True, generation_kwargs={"ignore_eos": True},
        )  # fmt: skip
        return found

    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(ask, range(3)))
    for prompt, answer, k in zip(PROMPTS, answers, (0, 3, 7), strict=True):
        expected = expected_raw(tiny_model, [prompt], answer["completion_ids"])
        for raw, own in zip(answer["raw_logprobs"], expected, strict=True):
            assert np.abs(np.array(raw) - own).max() < 1e-3
        widths = {len(one) for rows in answer["logprobs"] for one in rows}
        assert widths <= {max(1, k), k + 1}


def test_the_client_has_them_as_arrays(raw_server, tiny_model):
    with Client(raw_server.url) as client:
        (asked,) = client.generate([PROMPTS[0]], max_tokens=NUM_TOKENS, raw_logprobs=True, top_k=5)
        (other,) = client.generate([PROMPTS[0]], max_tokens=NUM_TOKENS)
        chat = client.chat(
            [{"role": "user", "content": "Hi"}], max_tokens=NUM_TOKENS, raw_logprobs=True
        )
    completion = asked.completions[0]
    (expected,) = expected_raw(tiny_model, [PROMPTS[0]], [completion.ids.tolist()])
    assert completion.raw_logprobs is not None
    assert completion.raw_logprobs.dtype == np.float32
    assert np.abs(completion.raw_logprobs - expected).max() < 1e-3
    assert other.completions[0].raw_logprobs is None
    assert chat[0].completions[0].raw_logprobs is not None


def test_they_are_refused_where_there_are_none(server, raw_server):
    body = {"prompts": PROMPTS[:1], "max_tokens": 1, "raw_logprobs": True}
    refused = server.post("/generate/", body)
    assert refused.status_code == 400
    assert "start it with --raw-logprobs" in refused.json()["error"]["message"]
    refused = raw_server.post("/generate/", {**body, "logprobs": None})
    assert refused.status_code == 400
    assert "expected logprobs of 0 or more" in refused.json()["error"]["message"]


def test_an_answer_without_them_is_an_error():
    """Of a worker that was started by hand without the setting, or whose vLLM lost the patch."""
    ids, values = np.array([5, 6], np.int32), np.array([-1, -2], np.float32)
    whole = Completion(ids.tobytes(), "stop", Logprobs(values.tobytes(), raw=values.tobytes()), [])
    without = Completion(ids.tobytes(), "stop", Logprobs(values.tobytes()), [])
    ended_early = Completion(b"", "abort", None, [])
    assert raw_logprobs([whole, ended_early]) == [values.tobytes(), b""]
    with pytest.raises(GenerationFailed, match="expected 2 raw log-probabilities, got 0; start"):
        raw_logprobs([whole, without])


def test_options_that_contradict_are_refused(tiny_model):
    environ: dict[str, str] = {}
    choose_runner(environ)
    assert environ == {RUNNER_VARIABLE: "0", "TITOPOOL_RAW_LOGPROBS": "true"}
    with pytest.raises(ConfigError, match=f"expected {RUNNER_VARIABLE} unset or 0, got '1'"):
        choose_runner({RUNNER_VARIABLE: "1"})
    draft = '{"method": "ngram", "num_speculative_tokens": 2}'
    for words, message in [
        (["--speculative-config", draft], "no --speculative-config"),
        (["--max-logprobs", "-1"], "the whole vocabulary"),
    ]:
        config = from_command_line([tiny_model, *words], {})
        options = parse_options(config, {"structured_outputs_config": {"backend": "xgrammar"}})
        with pytest.raises(ConfigError, match=message):
            check_raw_logprobs(options)
