"""SGLang's routes over real vLLM, compared with /generate/ in TRL's form and with transformers."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from harness.servers import Server, wait_until
from tests.kit.models import reference
from tests.kit.models.reference import PROMPT, TOLERANCE
from tests.kit.trainers.rl_trainer import InThread

IDS = PROMPT
OTHER = list(range(100, 140))


def generate(server: Server, **fields: Any) -> Any:
    answer = server.post("/generate", fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(server: Server, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post("/generate", {**fields, "stream": True})
    assert answer.status_code == 200, answer.text
    *events, done = [one.removeprefix("data: ") for one in answer.text.strip().split("\n\n")]
    assert done == "[DONE]"
    return [json.loads(one) for one in events]


def text_of(server: Server, ids: list[int]) -> str:
    return str(server.post("/detokenize", {"tokens": ids}).json()["prompt"])


def without_ids(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers without what differs between two equal requests."""
    for one in answers:
        for name in ("id", "cached_tokens"):
            del one["meta_info"][name]
    return answers


# ---- generation --------------------------------------------------------------------------


def test_greedy_ids_and_logprobs_equal_transformers(single_server: Server, tiny_model: str):
    options = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    found = generate(
        single_server, input_ids=IDS, sampling_params=options, return_logprob=True,
        top_logprobs_num=3, return_prompt_token_ids=True,
    )  # fmt: skip
    assert found["output_ids"] == reference.greedy(tiny_model, IDS, 24)
    assert found["prompt_token_ids"] == IDS
    meta = found["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(IDS), 24)
    rows = reference.logprobs(tiny_model, IDS, found["output_ids"])
    entries = meta["output_token_logprobs"]
    assert [(one[1], one[2]) for one in entries] == [(one, None) for one in found["output_ids"]]
    expected = rows[range(24), found["output_ids"]].tolist()
    assert [one[0] for one in entries] == pytest.approx(expected, abs=TOLERANCE)
    for row, best in zip(rows, meta["output_top_logprobs"], strict=True):
        assert [one[0] for one in best] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []


@pytest.mark.parametrize(
    "options",
    [{"sampling_seed": 11}, {"sampling_seed": 11, "n": 3},
     {"sampling_seed": 2, "n": 2, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.2}],
    ids=["seeded", "n", "options"],
)  # fmt: skip
def test_a_batch_is_prompt_major_and_equals_trl_s_form(single_server: Server, options):
    named = {name: one for name, one in options.items() if name != "sampling_seed"}
    kwargs = {"seed": options["sampling_seed"]}
    expected = single_server.generate([IDS, OTHER, [5]], **named, generation_kwargs=kwargs)
    found = generate(
        single_server, input_ids=[IDS, OTHER, [5]], return_logprob=True,
        sampling_params={**options, "max_new_tokens": 16},
    )  # fmt: skip
    assert [one["output_ids"] for one in found] == expected["completion_ids"]
    values = [[entry[0] for entry in one["meta_info"]["output_token_logprobs"]] for one in found]
    assert values == [
        pytest.approx([row[0] for row in rows], abs=1e-5) for rows in expected["logprobs"]
    ]
    n = options.get("n", 1)
    lengths = [one["meta_info"]["prompt_tokens"] for one in found]
    assert lengths == [length for length in (len(IDS), len(OTHER), 1) for _ in range(n)]


def test_each_prompt_of_a_batch_has_options_of_its_own(single_server: Server):
    options = [{"max_new_tokens": 3, "ignore_eos": True}, {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}]  # fmt: skip
    found = generate(
        single_server, text=["Hello", "a b"], sampling_params=options, rid=["one", None],
        return_logprob=[False, True], lora_path=None, image_data=[None, []],
    )  # fmt: skip
    assert [len(one["output_ids"]) for one in found] == [3, 5]
    assert found[0]["meta_info"]["id"] == "one"
    assert "output_token_logprobs" not in found[0]["meta_info"]
    assert len(found[1]["meta_info"]["output_token_logprobs"]) == 5
    alone = generate(single_server, text="a b", sampling_params=options[1])
    assert alone["output_ids"] == found[1]["output_ids"]


def test_the_prompt_s_log_probabilities_begin_where_asked(single_server: Server, tiny_model: str):
    rows = reference.logprobs(tiny_model, IDS[:1], IDS[1:])
    own = [None, *rows[range(len(IDS) - 1), IDS[1:]].tolist()]
    for start in (0, 3, len(IDS) - 1, len(IDS)):
        meta = generate(
            single_server, input_ids=IDS, return_logprob=True, logprob_start_len=start,
            top_logprobs_num=2, sampling_params={"max_new_tokens": 0},
        )["meta_info"]  # fmt: skip
        assert meta["output_token_logprobs"] == []
        assert (meta["completion_tokens"], meta["finish_reason"]) == (0, {"type": "length", "length": 0})  # fmt: skip
        entries = meta["input_token_logprobs"]
        assert [one[1:] for one in entries] == [[one, None] for one in IDS[start:]]
        assert [one[0] for one in entries[start == 0 :]] == pytest.approx(own[max(1, start) :], abs=TOLERANCE)  # fmt: skip
        if start == 0:
            assert entries[0][0] is meta["input_top_logprobs"][0] is None
        for row, best in zip(rows[max(0, start - 1) :], meta["input_top_logprobs"][start == 0 :], strict=True):  # fmt: skip
            assert [one[0] for one in best] == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)  # fmt: skip


def test_chosen_ids_and_texts(single_server: Server, tiny_model: str):
    found = generate(
        single_server, input_ids=IDS, return_logprob=True, token_ids_logprob=[7, 9],
        return_text_in_logprobs=True, sampling_params={"max_new_tokens": 6, "ignore_eos": True},
    )  # fmt: skip
    meta = found["meta_info"]
    rows = reference.logprobs(tiny_model, IDS, found["output_ids"])
    for row, entries in zip(rows, meta["output_token_ids_logprobs"], strict=True):
        assert [one[1] for one in entries] == [7, 9]
        assert [one[0] for one in entries] == pytest.approx(row[[7, 9]].tolist(), abs=TOLERANCE)
    texts = "".join(one[2] for one in meta["output_token_logprobs"])
    # A token that ends inside a character has no text of its own, also if it begins with a space.
    assert letters(texts) == letters(found["text"])


def letters(text: str) -> str:
    return "".join(text.replace("\ufffd", "").split())


def test_stops_by_token_and_by_text(single_server: Server, tiny_model: str):
    ids = reference.greedy(tiny_model, IDS, 8)
    text = text_of(single_server, ids)
    for options, reason, is_shown in (
        ({"stop_token_ids": [ids[3]]}, ids[3], False),
        ({"stop": text[3:5]}, text[3:5], False),
        ({"stop": [text[3:5]], "no_stop_trim": True}, text[3:5], True),
    ):
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **options}
        found = generate(single_server, input_ids=IDS, sampling_params=sampling)
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": reason}
        assert found["output_ids"] == ids[: len(found["output_ids"])]
        if isinstance(reason, str):
            assert found["text"].endswith(reason) == is_shown


def test_the_end_of_text_token_is_what_matched(single_server: Server):
    options = {"logit_bias": {"0": 100}, "temperature": 0, "max_new_tokens": 2}
    found = generate(single_server, input_ids=[5], sampling_params=options)
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}
    assert (found["output_ids"], found["text"]) == ([0], "")


@pytest.mark.parametrize(
    "options, pattern",
    [({"regex": "(yes|no)"}, None), ({"json_schema": '{"enum": ["yes", "no"]}'}, '"'),
     ({"ebnf": 'root ::= "yes" | "no"'}, None)],
)  # fmt: skip
def test_structured_outputs(single_server: Server, options, pattern):
    sampling = {"max_new_tokens": 20, **options}
    found = generate(single_server, input_ids=IDS, sampling_params=sampling)
    assert found["text"].strip(pattern) in ("yes", "no")


def test_a_stream_has_all_tokens_so_far_and_ends_as_the_whole_answer(single_server: Server):
    fields = {
        "input_ids": [IDS, OTHER], "return_logprob": True, "rid": "a",
        "sampling_params": {"n": 2, "sampling_seed": 5, "max_new_tokens": 20},
    }  # fmt: skip
    whole = generate(single_server, **fields)
    events = events_of(single_server, **fields)
    assert len(events) > 20
    last: dict[int, dict[str, Any]] = {}
    for event in events:
        index = event.pop("index")
        before = last.get(index, {"output_ids": [], "text": "", "meta_info": {"finish_reason": None}})  # fmt: skip
        assert before["meta_info"]["finish_reason"] is None, "a completion went on after its end"
        assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert event["text"].startswith(before["text"])
        assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])
        last[index] = event
    ends = without_ids([last[index] for index in range(4)])
    for end, expected in zip(ends, without_ids(whole), strict=True):
        name = "output_token_logprobs"
        found, wanted = (np.array(one["meta_info"].pop(name), float) for one in (end, expected))
        assert np.allclose(found, wanted, atol=1e-5, equal_nan=True)
        assert end == expected


def test_one_prompt_s_stream_has_no_index(single_server: Server):
    options = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    events = events_of(single_server, text="Hello", sampling_params=options, rid="b")
    assert all("index" not in one and one["meta_info"]["id"] == "b" for one in events)
    assert events[-1]["output_ids"] == generate(single_server, text="Hello", sampling_params=options)["output_ids"]  # fmt: skip


@pytest.mark.parametrize(
    "body, part",
    [
        ({"input_ids": []}, "input_ids: expected at least one token"),
        ({"input_ids": [[1], []]}, "input_ids[1]: expected at least one token"),
        ({"input_ids": [[1], [2048]]}, "input_ids[1][0]: expected a token id in [0, 2048)"),
        ({"input_ids": [1] * 1024}, "exceeds the model's context length"),
        ({"text": ""}, "text: expected at least one token"),
        ({"text": "a", "sampling_params": {"n": 2, "temperature": 0}}, "sampling_params: n: expected 1"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 200}}, "min_new_tokens: expected at most max_new_tokens (128)"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num: expected at most 128"),
        ({"input_ids": IDS, "return_logprob": True, "logprob_start_len": 999}, "logprob_start_len: expected at most"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "grammar"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "expected exactly one of"),
        ({"text": "a", "image_data": "aGVsbG8="}, "image_data: expected no images"),
        ({"text": "a", "image_data": ["x"], "mm_processor_kwargs": {"patch_size": 2}}, "mm_processor_kwargs"),
        ({"input_ids": [[5]] * 2, "sampling_params": {"n": 10**6}}, "input_ids: expected at most"),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_and_the_server_serves_on(single_server: Server, body, part):
    answer = single_server.post("/generate", body)
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]
    assert generate(single_server, input_ids=IDS, sampling_params={"max_new_tokens": 1})[
        "output_ids"
    ]


def test_an_unknown_adapter_is_not_found(single_server: Server):
    answer = single_server.post("/generate", {"text": "a", "lora_path": "none"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_path")


# ---- control -----------------------------------------------------------------------------

LONG = {"max_new_tokens": 600, "ignore_eos": True}


@pytest.fixture
def restored(single_server: Server, tiny_model: str) -> Iterator[None]:
    """The model's own weights serve, and nothing is paused, before and afterwards."""

    def restore() -> None:
        assert single_server.post("/continue_generation", {}).status_code == 200
        body = {"path": tiny_model, "policy": "abort", "version": 0}
        assert single_server.post("/update_weights", body).status_code == 200

    restore()
    yield
    restore()


def num_running(server: Server) -> float:
    return sum(server.metrics("sequences").values())


def started(server: Server, **fields: Any) -> InThread:
    """A long generation, which the engine runs by now."""
    wait_until(lambda: num_running(server) == 0, 30)
    body = {"input_ids": IDS, "sampling_params": LONG, "return_logprob": True, **fields}
    call = InThread(server, "/generate", body)
    wait_until(lambda: num_running(server) > 0, 30)
    return call


def good(server: Server, path: str, body: Any = None) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_update_from_disk_has_a_label_of_its_own(
    single_server: Server, other_model: str, restored: None
):
    options = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"model_path": other_model, "weight_version": "step-7", "abort_all_requests": True, "load_format": None}  # fmt: skip
    outcome = good(single_server, "/update_weights_from_disk", body)
    assert (outcome["success"], outcome["num_paused_requests"]) == (True, 0)
    expected = reference.greedy(other_model, IDS, 8)
    # Both front ends answer so.
    for _ in range(8):
        found = generate(single_server, input_ids=IDS, sampling_params=options)
        assert found["output_ids"] == expected
        assert found["meta_info"]["weight_version"] == "step-7"
        span = {"version": "step-7", "start": 0, "end": 8}
        assert found["meta_info"]["weight_versions"] == [span]


@pytest.mark.parametrize(
    "body, part",
    [({"model_path": "/etc"}, "expected a folder below weights_root"), ({}, "model_path"),
     ({"model_path": "/etc", "load_format": "dummy"}, "load_format"),
     ({"model_path": "/etc", "keep_pause": True}, "keep_pause: expected false"),
     ({"model_path": "/etc", "manifest": {}}, "manifest")],
)  # fmt: skip
def test_a_failed_update_is_a_400_that_says_why(single_server: Server, body, part):
    answer = single_server.post("/update_weights_from_disk", body)
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert part in found["message"]
    assert (found["success"], found["num_paused_requests"]) == (False, 0)
    assert found["error"]["message"] == found["message"]


def test_areal_s_round_pauses_aborts_updates_and_continues(
    single_server: Server, other_model: str, restored: None
):
    call = started(single_server)
    good(single_server, "/pause_generation", {})
    aborted = call.answer().json()
    meta = aborted["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert len(meta["output_token_logprobs"]) == len(aborted["output_ids"]) < 600
    # A request that comes now waits, until the update ends it as it ends all requests.
    waiting = InThread(
        single_server, "/generate", {"input_ids": IDS, "return_logprob": True},
    )  # fmt: skip
    wait_until(lambda: num_running(single_server) > 0, 30)
    body = {"model_path": other_model, "abort_all_requests": True}
    assert good(single_server, "/update_weights_from_disk", body)["success"]
    assert single_server.get("/is_paused").json()["is_paused"]
    meta = waiting.answer().json()["meta_info"]
    assert meta["finish_reason"]["message"] == "Abort before prefill"
    assert meta["output_token_logprobs"] == meta["weight_versions"] == []
    good(single_server, "/continue_generation", {})
    options = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    found = generate(single_server, input_ids=IDS, sampling_params=options)
    assert found["output_ids"] == reference.greedy(other_model, IDS, 4)


def test_a_pause_keeps_requests_which_go_on_with_the_new_weights(
    single_server: Server, tiny_model: str, other_model: str, restored: None
):
    call = started(single_server)
    for mode, folder in (("in_place", other_model), ("retract", tiny_model)):
        good(single_server, "/pause_generation", {"mode": mode})
        body = {"model_path": folder, "weight_version": f"after {mode}"}
        assert good(single_server, "/update_weights_from_disk", body)["success"]
        good(single_server, "/continue_generation", {})
        # The long request has tokens of these weights when this one has some.
        generate(single_server, input_ids=IDS, sampling_params={"max_new_tokens": 2})
    meta = call.answer().json()["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 600}
    first, second, last = meta["weight_versions"]
    ends = (first["start"], first["end"], second["end"], last["end"])
    assert ends == (0, second["start"], last["start"], 600)
    assert second["version"] == "after in_place"
    assert last["version"] == meta["weight_version"] == "after retract"


def test_requests_end_by_their_ids(single_server: Server):
    kept = started(single_server, rid="kept", sampling_params={**LONG, "max_new_tokens": 300})
    call = InThread(
        single_server, "/generate", {"input_ids": [IDS, OTHER], "rid": ["kept-too", "ended"], "sampling_params": [{"max_new_tokens": 8}, LONG]},
    )  # fmt: skip
    wait_until(lambda: num_running(single_server) > 1, 30)
    assert good(single_server, "/abort_request", {"rid": "none"})["aborted"] == 0
    wait_until(lambda: good(single_server, "/abort_request", {"rid": "ended"})["aborted"] == 1, 30)
    reasons = [one["meta_info"]["finish_reason"]["type"] for one in call.answer().json()]
    assert reasons[1] == "abort"
    assert reasons[0] != "abort"
    assert kept.answer().json()["meta_info"]["finish_reason"]["type"] == "length"
    call = started(single_server)
    assert good(single_server, "/abort_request", {"abort_all": True})["aborted"] == 1
    assert call.answer().json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_caches_are_empty_after_a_flush(single_server: Server):
    ids = list(range(500, 700))

    def num_cached() -> int:
        found = generate(single_server, input_ids=ids, sampling_params={"max_new_tokens": 1})
        return int(found["meta_info"]["cached_tokens"])

    for flush in (lambda: single_server.get("/flush_cache?timeout=5"), lambda: single_server.post("/flush_cache", None)):  # fmt: skip
        num_cached()
        assert num_cached() > 0
        assert flush().status_code == 200
        assert num_cached() == 0


@pytest.mark.parametrize(
    "path, body, part",
    [("/pause_generation", {"mode": "keep"}, "mode"), ("/pause_generation", {"modus": "abort"}, "modus"),
     ("/continue_generation", {"mode": "abort"}, "mode"), ("/abort_request", {}, "expected either a rid or abort_all"),
     ("/abort_request", {"rid": "a", "abort_all": True}, "got both"),
     ("/update_weights_from_distributed", {}, "use /update_weights_from_disk")],
)  # fmt: skip
def test_a_bad_call_is_refused_by_name(single_server: Server, path, body, part):
    answer = single_server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]
    assert not single_server.get("/is_paused").json()["is_paused"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_grammar_that_the_engine_refuses_is_named_as_it_was_sent(
    single_server: Server, is_streamed: bool
):
    options = {"json_schema": {"type": 3}, "max_new_tokens": 4}
    body = {"text": "Hello", "sampling_params": options, "stream": is_streamed}
    answer = single_server.post("/generate", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "sampling_params"
    assert "vLLM refused the grammar" in answer.json()["error"]["message"]
