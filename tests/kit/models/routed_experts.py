"""Routed experts that a server returns, compared with the router of transformers.

    python -m tests.kit.models.routed_experts

It runs on a GPU as it is, and on CPUs with Triton's interpreter. Each check prints a line.
"""

import base64
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from app.call.openai_logprobs import LEAST
from harness.servers import REPOSITORY, Server, environment, free_port
from tests.kit.models.model_families import EXPERTS, SHAPE
from tests.kit.models.reference import reference_model
from titopool import Client
from titopool.demo_model import make_tokenizer
from titopool.settings.gpus import visible_gpus
from titopool.settings.vllm_options import is_unknown

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
# The first layer has no experts.
CONFIG = {**SHAPE, **EXPERTS, "num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [0]}
NUM_LAYERS, NUM_CHOSEN = 3, EXPERTS["num_experts_per_tok"]
OPTIONS = (
    "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager",
    "--gpu-memory-utilization", "0.3",
)  # fmt: skip
# Longer than a few blocks of the prefix cache, on CPUs of 128 tokens.
PROMPT = np.random.default_rng(0).integers(5, 400, 150).tolist()
NUM_TOKENS = 6
# vLLM's masks need a top_k.
SAMPLING = {"top_k": 50, "ignore_eos": True, "seed": 1}
MASKS = "--return-sampling-mask"
# Experts whose scores are closer may be chosen by one side only: GPUs multiply in TF32.
TIE = 1e-2


def make_mixture(folder: Path, seed: int) -> str:
    """Writes a random mixture of experts to a new `folder`; returns its path."""
    folder.mkdir()
    make_tokenizer(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG), dtype=torch.float32)
    model.save_pretrained(folder)
    return str(folder)


@contextmanager
def mixture_server(folder: str, working: Path) -> Iterator[Server]:
    """A server of one worker that returns routed experts and, where vLLM can, sampling masks."""
    options = ["--enable-return-routed-experts", *([] if is_unknown(MASKS) else [MASKS])]
    module = "workers" if visible_gpus() else "tests.kit.workers.interpreted_worker"
    endpoint, port, log = f"ipc://{working}/worker", free_port(), working / "log"
    commands = (
        [module, "--endpoint", endpoint, folder, *OPTIONS, *options],
        [
            "titopool.cli",
            "serve",
            "--endpoints",
            endpoint,
            "--port",
            str(port),
            "--run-dir",
            str(working / "run"),
        ],
    )
    variables = environment(TITOPOOL_WEIGHTS_ROOT=str(Path(folder).parent))
    processes = []
    try:
        with log.open("wb") as output:
            for command in commands:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *command],
                        env=variables, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        # A worker that ends while it starts is the server's end.
        server = Server(processes[0], f"http://127.0.0.1:{port}", log)
        server.wait_until_ready()
        yield server
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def generate(server: Server, ids: list[int], options: dict[str, Any], **fields: Any) -> Any:
    """The whole response; the status must be 200."""
    sampling = {**SAMPLING, "max_tokens": NUM_TOKENS, **options}
    answer = server.post(GENERATE, {"token_ids": ids, "sampling_params": sampling, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def experts_of(choice: dict[str, Any]) -> np.ndarray:
    """A choice's routed experts, as verifiers decodes them: [rows, layers, experts of a token]."""
    sent = choice["routed_experts"]
    data = np.frombuffer(base64.b64decode(sent["data"]), np.dtype(sent["dtype"]))
    return data.reshape(sent["shape"])


def generate_as_sglang(server: Server, num_tokens: int = NUM_TOKENS, **fields: Any) -> Any:
    """The response to `POST /generate` in SGLang's form; the status must be 200."""
    options = {"top_k": 50, "ignore_eos": True, "sampling_seed": 1, "max_new_tokens": num_tokens}
    options |= fields.pop("sampling_params", {})
    body = {"sampling_params": options, "return_routed_experts": True, **fields}
    answer = server.post("/generate", body)
    assert answer.status_code == 200, answer.text
    return answer


def as_choice(shown: dict[str, Any], start: int = 0) -> dict[str, Any]:
    """A completion of SGLang's form as a choice of the other route; its rows as AReaL reads them."""
    meta = shown["meta_info"]
    num_rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1 - start
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(num_rows, -1)
    sent = {
        "data": base64.b64encode(rows.tobytes()).decode(),
        "shape": (num_rows, NUM_LAYERS, NUM_CHOSEN), "start": start, "dtype": "int32",
    }  # fmt: skip
    return {"token_ids": shown["output_ids"], "routed_experts": sent}


def pieces_of(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The choices in the events of a stream, in order."""
    sent = [one.removeprefix(b"data: ") for one in lines if one]
    assert sent.pop() == b"[DONE]"
    return [json.loads(one)["choices"][0] for one in sent]


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice of a stream's pieces; only the last one has the experts."""
    assert len(pieces) > 1
    assert all(one["routed_experts"] is None for one in pieces[:-1])
    return pieces[-1] | {"token_ids": [token for one in pieces for token in one["token_ids"]]}


@contextmanager
def running_stream(server: Server) -> Iterator[Iterable[bytes]]:
    """The lines of a stream with the id "a", whose first chunk has come."""
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "max_tokens": 100}}
    with server.post(GENERATE, body | {"request_id": "a", "stream": True}, stream=True) as answer:
        lines = answer.iter_lines()
        yield chain([next(lines)], lines)


@torch.inference_mode()
def assert_routed(folder: str, ids: list[int], choice: dict[str, Any], start: int = 0) -> None:
    """Compares a choice's experts with those that transformers' router chooses for its tokens."""
    found, tokens = experts_of(choice), ids + choice["token_ids"]
    assert choice["routed_experts"]["start"] == start
    # The model does not run on the last token.
    assert found.shape == (len(tokens) - 1 - start, NUM_LAYERS, NUM_CHOSEN)
    assert not found[:, 0].any(), "a layer without experts has zeros"
    output = reference_model(folder)(torch.tensor([tokens]), output_router_logits=True)
    for layer, scores in enumerate(output.router_logits, 1):
        best = scores[start:-1].topk(NUM_CHOSEN + 1)
        is_clear = best.values[:, -2] - best.values[:, -1] > TIE
        assert is_clear.float().mean() > 0.5
        expected = best.indices[:, :-1].sort().values.numpy()
        rows = np.sort(found[:, layer])
        assert (rows == expected)[is_clear.numpy()].all(), f"layer {layer}"


# ---- checks -----------------------------------------------------------------------------


def check_cached_prompts(server: Server, folder: str) -> None:
    """A prompt whose first tokens are in the prefix cache has the rows of all tokens."""
    fresh, again = (generate(server, PROMPT, {}).json() for _ in range(2))
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (fresh, again)]
    assert cached[0] == 0 < cached[1]
    for answer in (fresh, again):
        assert_routed(folder, PROMPT, answer["choices"][0])


def check_several_completions(server: Server, folder: str) -> None:
    """Each of n completions has its own rows."""
    choices = generate(server, PROMPT[::-1], {"n": 3}).json()["choices"]
    assert len({tuple(one["token_ids"]) for one in choices}) == 3
    for choice in choices:
        assert_routed(folder, PROMPT[::-1], choice)


def check_start(server: Server, folder: str) -> None:
    """Rows begin at `routed_experts_prompt_start`, before and after the end of the cached tokens."""
    for start in (20, 140, len(PROMPT) - 1):
        answer = generate(server, PROMPT, {"routed_experts_prompt_start": start}).json()
        assert_routed(folder, PROMPT, answer["choices"][0], start)
    options = {"top_k": 1, "routed_experts_prompt_start": len(PROMPT)}
    answer = server.post(GENERATE, {"token_ids": PROMPT, "sampling_params": options})
    assert answer.status_code == 400, answer.text
    assert "routed_experts_prompt_start: expected less than" in answer.json()["error"]["message"]


def check_streams(server: Server, folder: str) -> None:
    """The last event of a choice has the rows of the whole choice."""
    answer = generate(server, PROMPT, {"n": 2, "routed_experts_prompt_start": 9}, stream=True)
    pieces = pieces_of(answer.iter_lines())
    for index in range(2):
        assert_routed(folder, PROMPT, joined([one for one in pieces if one["index"] == index]), 9)


def check_forms(server: Server, folder: str) -> None:
    """renderers finds the rows by their bytes; vLLM's form holds the same array."""
    answer = generate(server, PROMPT, {})
    assert b'"routed_experts":{"data":"' in answer.content
    npy = generate(server, PROMPT, {}, routed_experts_format="npy").json()
    array = np.load(io.BytesIO(base64.b64decode(npy["choices"][0]["routed_experts"])))
    expected = experts_of(answer.json()["choices"][0])
    assert array.dtype == expected.dtype
    assert (array == expected).all()


def check_sglang(server: Server, folder: str) -> None:
    """SGLang's form has the rows of a batch, of n completions and of a stream in 32 bits."""
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:1]]
    shown = generate_as_sglang(server, 2, input_ids=prompts, sampling_params={"n": 2}).json()
    for index, one in enumerate(shown):
        assert_routed(folder, prompts[index // 2], as_choice(one))
    for start in (20, len(PROMPT)):
        fields = {"input_ids": PROMPT, "routed_experts_start_len": start}
        whole = generate_as_sglang(server, 3, **fields).json()
        assert_routed(folder, PROMPT, as_choice(whole, start), start)
        lines = generate_as_sglang(server, 3, stream=True, **fields).iter_lines()
        *others, last = (json.loads(one[6:]) for one in lines if one and one != b"data: [DONE]")
        assert not any("routed_experts" in one["meta_info"] for one in others)
        assert_routed(folder, PROMPT, as_choice(last, start), start)
    # A prompt that is scored only has no row for its last token.
    assert_routed(folder, PROMPT, as_choice(generate_as_sglang(server, 0, input_ids=PROMPT).json()))
    plain = generate_as_sglang(server, 1, input_ids=PROMPT, return_routed_experts=False).json()
    assert "routed_experts" not in plain["meta_info"]
    fields = {"input_ids": [PROMPT, [5]], "routed_experts_start_len": 2}
    refused = server.post("/generate", {**fields, "return_routed_experts": True})
    assert refused.status_code == 400
    assert "routed_experts_start_len: expected at most 1" in refused.json()["error"]["message"]


def check_sessions(server: Server, folder: str) -> None:
    """A session's sample has the rows of all turns, of which each worker's answer has its own only."""
    with Client(server.url) as client, client.session() as session:
        path = f"/sessions/{session.id}"
        (sample,) = _played(server, path)
        start, ids = sample["prompt_length"], sample["ids"]
        choice = {"token_ids": ids[start:], "routed_experts": sample["routed_experts"]}
        assert_routed(folder, ids[:start], choice)
        (found,) = session.samples()
        assert np.array_equal(found.routed_experts, experts_of(choice))
        trained = safetensors.numpy.load(server.post(f"{path}/samples", {}).content)
        rows = trained["rollout_routed_experts.0"]
        assert rows.dtype == np.int32
        assert np.array_equal(rows, experts_of(choice))


def _played(server: Server, path: str) -> list[dict[str, Any]]:
    """The samples of a session in which three turns were asked for, one of them as a stream."""
    messages = [{"role": "user", "content": "word " * 150}]
    for is_streamed in (False, True, False):
        body = {"messages": messages, "max_tokens": NUM_TOKENS, "top_k": 50, "ignore_eos": True}
        answer = server.post(f"{path}/v1/chat/completions", {**body, "stream": is_streamed})
        assert answer.status_code == 200, answer.text
        if is_streamed:
            lines = answer.text.splitlines()
            pieces = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
            deltas = [one["choices"][0]["delta"] for one in pieces if one["choices"]]
            said = "".join(delta.get("content") or "" for delta in deltas)
        else:
            said = answer.json()["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."},
        ]  # fmt: skip
    samples: list[dict[str, Any]] = server.get(f"{path}/samples").json()["samples"]
    assert [one["reasons"] for one in samples] == [["first", "", ""]]
    return samples


def check_masks(server: Server, folder: str) -> None:
    """A sampling mask has the ids with a probability, of a stream with its last piece."""
    options = {"top_k": 4, "top_p": 0.8, "logprobs": 4}
    (choice,) = generate(server, PROMPT, options).json()["choices"]
    streamed = joined(pieces_of(generate(server, PROMPT, options, stream=True).iter_lines()))
    assert streamed["sampling_mask"] == choice["sampling_mask"]
    if is_unknown(MASKS):
        assert choice["sampling_mask"] is None
        return
    for mask, entry in zip(choice["sampling_mask"], choice["logprobs"]["content"], strict=True):
        assert set(mask) == {
            one["token_id"] for one in entry["top_logprobs"] if one["logprob"] > LEAST
        }
    assert max(map(len, choice["sampling_mask"])) > 1


def check_aborts(server: Server, folder: str) -> None:
    """A completion that was aborted has the rows of its tokens so far."""
    with running_stream(server) as lines:
        assert server.post(ABORT, {"request_ids": ["a"]}).status_code == 200
        pieces = pieces_of(lines)
    assert pieces[-1]["finish_reason"] == "abort"
    assert_routed(folder, PROMPT, joined(pieces))


def check_new_weights(server: Server, folder: str) -> None:
    """An update leaves a running completion its rows; later ones are those of the new router."""
    other = make_mixture(Path(folder).parent / "other", seed=1)
    with running_stream(server) as lines:
        update = {"path": other, "policy": "keep"}
        for path, body in (
            ("/pause?mode=keep", None),
            ("/update_weights", update),
            ("/resume", None),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 200, answer.text
        choice = joined(pieces_of(lines))
    assert len(choice["weight_versions"]) == 2
    num_rows = len(PROMPT) + len(choice["token_ids"]) - 1
    assert experts_of(choice).shape == (num_rows, NUM_LAYERS, NUM_CHOSEN)
    assert_routed(other, PROMPT, generate(server, PROMPT, {}).json()["choices"][0])


# In this order: the first finds an empty prefix cache, the last changes the model.
CHECKS = (
    check_cached_prompts, check_several_completions, check_start, check_streams, check_forms,
    check_sglang, check_sessions, check_masks, check_aborts, check_new_weights,
)  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        working = Path(name)
        folder = make_mixture(working / "model", seed=0)
        with mixture_server(folder, working) as server:
            for check in CHECKS:
                check(server, folder)
                print(f"{check.__name__}: as transformers' router", flush=True)


if __name__ == "__main__":
    main()
