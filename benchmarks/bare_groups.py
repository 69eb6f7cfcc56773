"""The bare engine behind HTTP for one caller, so that it stays ready between the runs of two servers.

    python -m benchmarks.bare_groups MODEL PORT '{"max_num_seqs": 32, …}'

`GET /health` answers once the engine is ready. `POST /run` takes `prompts` of ids, `n`, `max_tokens`,
further fields of SamplingParams as `sampling`, and `at_once`: how many prompts are in flight. 0: all,
by `LLM.generate`. Otherwise, a prompt follows each one that ends, as from a client that waits, by the
calls that `LLM.generate` itself makes. The answer has the lengths of all completions, the engine's
steps, and seconds in which nothing is read from or written to the caller.
"""

import json
import sys
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import psutil

from benchmarks.targets import JSON_HEADERS, Engine
from benchmarks.workload import Call


class BareGroups:
    """The target; the arguments are those of `benchmarks.targets.Target`."""

    name = "bare engine"
    ready_path = "/health"
    num_workers = 1
    headers = JSON_HEADERS

    def command(self, engine: Engine, port: int) -> tuple[list[str], dict[str, str]]:
        words = [sys.executable, "-m", "benchmarks.bare_groups", engine.model, str(port)]
        return [*words, json.dumps(dict(engine.options))], {}

    def is_ready(self, status: int, answer: bytes) -> bool:
        return status == 200

    def body_of_all(self, calls: list[Call], at_once: int, max_tokens: int) -> bytes:
        """One body for all calls, which have one prompt each unless `at_once` is 0."""
        first = calls[0]
        prompts = [prompt for call in calls for prompt in call.prompts]
        fields = {"prompts": prompts, "n": first.n, "max_tokens": max_tokens, "at_once": at_once}
        return json.dumps({**fields, "sampling": dict(first.sampling)}).encode()

    def is_worker(self, process: psutil.Process, root: psutil.Process) -> bool:
        return True


class Runner:
    """Runs jobs one at a time and counts the engine's steps."""

    def __init__(self, model: str, options: Mapping[str, Any]):
        from vllm import LLM

        self._llm = LLM(model=model, **options)
        self._num_steps = self._next_id = 0
        self._step = self._llm.llm_engine.step
        self._llm.llm_engine.step = self._counted_step

    def _counted_step(self) -> Any:
        self._num_steps += 1
        return self._step()

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = dict(job["sampling"])
        if "logit_bias" in sampling:
            # JSON has no keys that are numbers.
            sampling["logit_bias"] = {int(key): to for key, to in sampling["logit_bias"].items()}
        params = SamplingParams(
            n=job["n"], max_tokens=job["max_tokens"], ignore_eos=True, logprobs=0,
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **sampling,
        )  # fmt: skip
        prompts = [tokens_input(ids) for ids in job["prompts"]]
        self._num_steps, begin = 0, time.monotonic()
        if job["at_once"]:
            outputs = self._few_at_once(prompts, params, job["at_once"])
        else:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.monotonic() - begin
        lengths = [len(one.token_ids) for output in outputs for one in output.outputs]
        return {"elapsed_s": elapsed_s, "lengths": lengths, "num_steps": self._num_steps}

    def _few_at_once(self, prompts: list[Any], params: Any, at_once: int) -> list[Any]:
        engine, ended = self._llm.llm_engine, []
        for prompt in prompts[:at_once]:
            self._add(prompt, params)
        rest = iter(prompts[at_once:])
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    ended.append(output)
                    if (prompt := next(rest, None)) is not None:
                        self._add(prompt, params)
        return ended

    def _add(self, prompt: Any, params: Any) -> None:
        self._next_id += 1
        self._llm.llm_engine.add_request(f"bare-{self._next_id}", prompt, params)


class _Handler(BaseHTTPRequestHandler):
    runner: Runner

    def do_GET(self) -> None:
        self._answer(200, {})

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self._answer(200, self.runner.run(job))
        except Exception as error:
            self._answer(500, {"error": repr(error)})
            raise

    def _answer(self, status: int, fields: dict[str, Any]) -> None:
        answer = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    model, port, options = sys.argv[1:]
    _Handler.runner = Runner(model, json.loads(options))
    # Listens only now: the engine is ready.
    HTTPServer(("127.0.0.1", int(port)), _Handler).serve_forever()


if __name__ == "__main__":
    main()
