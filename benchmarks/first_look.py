"""The server beside the bare engine, in one run on one machine.

    python -m benchmarks.first_look                        # tiny model, any machine
    python -m benchmarks.first_look --shape qwen3-0.6b --num-workers 1 2 \
        --num-prompts 512 --input-len 256 --output-len 256     # on GPUs

For each number of workers it starts the server and sends the same prompts as one request and
as one-prompt requests at once, three times in turn; the table has medians. A run whose token
counts are not what was asked for ends with an error.
"""

import argparse
import concurrent.futures
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

SHAPES = {
    "tiny": {},
    "qwen3-0.6b": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 4096,
    },
}  # fmt: skip

BARE_ENGINE = """
import json, sys, time
from vllm import LLM, SamplingParams
def main():
    job = json.load(open(sys.argv[1]))
    begin = time.monotonic()
    llm = LLM(**job["engine"])
    start_s = time.monotonic() - begin
    params = SamplingParams(max_tokens=job["output_len"], ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    llm.generate(prompts, params, use_tqdm=False)
    times = []
    for _ in range(job["repeats"]):
        llm.reset_prefix_cache()
        begin = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        times.append(time.monotonic() - begin)
        assert all(len(one.outputs[0].token_ids) == job["output_len"] for one in outputs)
    with open(sys.argv[2], "w") as file:
        json.dump({"start_s": start_s, "times_s": times}, file)
if __name__ == "__main__":
    main()
"""


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(options.shape, Path(folder) / "model")
        prompts = make_prompts(options.num_prompts, options.input_len)
        rows = [("bare engine", *bare_engine(model, prompts, options, Path(folder)))]
        for num_workers in options.num_workers:
            rows += measure_server(model, prompts, options, num_workers, Path(folder) / "log")
    print_table(rows, options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[1])
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def make_model(shape: str, folder: Path) -> str:
    """A folder with a configuration and a tokenizer; weights are vLLM's dummies unless tiny."""
    from titopool.demo_model import make_model as make_with_weights
    from titopool.demo_model import make_tokenizer

    if shape == "tiny":
        make_with_weights(folder)
    else:
        from transformers import Qwen3Config

        folder.mkdir()
        make_tokenizer(folder)
        fields = SHAPES[shape] | {"tie_word_embeddings": True, "eos_token_id": 0}
        config = Qwen3Config(**fields, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
        config.save_pretrained(folder)
    return str(folder)


def make_prompts(num_prompts: int, input_len: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(1, 2000) for _ in range(input_len)] for _ in range(num_prompts)]


def engine_options(model: str, options: argparse.Namespace) -> dict[str, object]:
    chosen: dict[str, object] = {"model": model, "max_model_len": 2048}
    chosen |= {"logprobs_mode": "processed_logprobs"}
    if options.shape == "tiny":
        return chosen | {"dtype": "float32"}
    return chosen | {"load_format": "dummy"}


def bare_engine(
    model: str, prompts: list[list[int]], options: argparse.Namespace, folder: Path
) -> tuple[float, float]:
    """Seconds to start, and the median seconds for all prompts."""
    from titopool.gpus import visible_gpus

    engine, environ = engine_options(model, options), dict(os.environ)
    if not visible_gpus():
        engine |= {"enforce_eager": True, "gpu_memory_utilization": 0.5}
        environ |= {
            "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
    job = {"engine": engine, "prompts": prompts, "output_len": options.output_len}
    job["repeats"] = options.repeats
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "bare.py").write_text(BARE_ENGINE)
    # What the engine itself prints must not stand between the figures.
    answer_file = folder / "answer.json"
    subprocess.run(
        [sys.executable, str(folder / "bare.py"), str(folder / "job.json"), str(answer_file)],
        env=environ, stdout=subprocess.DEVNULL, check=True, timeout=600,
    )  # fmt: skip
    answer = json.loads(answer_file.read_text())
    return answer["start_s"], statistics.median(answer["times_s"])


def measure_server(
    model: str, prompts: list[list[int]], options: argparse.Namespace, num_workers: int, log: Path
) -> list[tuple[str, float, float]]:
    flags = []
    for name, value in engine_options(model, options).items():
        if name != "model":
            flags += ["--" + name.replace("_", "-"), str(value)]
    url = "http://127.0.0.1:8077"
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "titopool.cli", "serve", model, "--port", "8077",
                "--num-workers", str(num_workers), *flags,
            ],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until_ready(url, num_workers, process, log)
        start_s = time.monotonic() - begin
        batch, single = [], []
        send(url, prompts, options)
        for _ in range(options.repeats):
            batch.append(send(url, prompts, options))
            single.append(send_one_by_one(url, prompts, options))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    name = f"server, {num_workers} worker{'s' * (num_workers > 1)}"
    return [
        (f"{name}, one request", start_s, statistics.median(batch)),
        (f"{name}, {len(prompts)} requests at once", start_s, statistics.median(single)),
    ]


def wait_until_ready(url: str, num_workers: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(url + "/ready", timeout=5).json()["num_ready"] == num_workers:
                return
        except requests.RequestException:
            pass
        time.sleep(0.1)
    sys.exit(f"the server did not start:\n{log.read_text()[-6000:]}")


def send(url: str, prompts: list[list[int]], options: argparse.Namespace) -> float:
    # A new salt each time: what an earlier round left in the prefix cache must not help.
    salt = str(time.monotonic())
    body = {
        "prompts": [{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts],
        "max_tokens": options.output_len,
        "generation_kwargs": {"ignore_eos": True},
    }
    begin = time.monotonic()
    answer = requests.post(url + "/generate/", json=body, timeout=600)
    elapsed_s = time.monotonic() - begin
    answer.raise_for_status()
    lengths = {len(ids) for ids in answer.json()["completion_ids"]}
    if lengths != {options.output_len}:
        sys.exit(f"expected {options.output_len} tokens for each prompt, got {lengths}")
    return elapsed_s


def send_one_by_one(url: str, prompts: list[list[int]], options: argparse.Namespace) -> float:
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        begin = time.monotonic()
        list(pool.map(lambda ids: send(url, [ids], options), prompts))
        return time.monotonic() - begin


def print_table(rows: list[tuple[str, float, float]], options: argparse.Namespace) -> None:
    import vllm

    num_tokens = options.num_prompts * options.output_len
    limit = num_tokens / rows[0][2]
    print(
        f"\n{options.shape}, {options.num_prompts} x {options.input_len} in, "
        f"{options.output_len} out, logprobs 0, vLLM {vllm.__version__}, "
        f"median of {options.repeats}\n"
    )
    print("| | start s | time s | tok/s | of the engine |\n|---|---|---|---|---|")
    for name, start_s, time_s in rows:
        rate = num_tokens / time_s
        print(f"| {name} | {start_s:.1f} | {time_s:.2f} | {rate:,.0f} | {rate / limit:.2f} |")


if __name__ == "__main__":
    main()
