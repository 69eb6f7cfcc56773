"""`titopool demo`: starts a server with the demo model and walks through what it does.

Everything runs against the real server, with the calls that a trainer would make.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titopool.commands.help import Command, Option
from titopool.errors import TitopoolError

if TYPE_CHECKING:
    from titopool.client.results import WorkerStatus
    from titopool.client.sync_client import Client

# Of the server's output, if it does not start.
QUOTED_LINES = 20
# Of the noise that makes the demo's new weights.
NOISE = 0.02
PROMPT = "Hello, world"


@click.command("demo", cls=Command, examples=["titopool demo", "titopool demo --keep"])
@click.option(
    "--keep", cls=Option, section="Options", is_flag=True,
    help="Go on serving after the last step, until Ctrl-C.",
)  # fmt: skip
def demo(keep: bool) -> None:
    """Start a server with a tiny random model, and show what it does, step by step.

    Text to ids, a completion with log-probabilities, a rollout of two turns, new weights. It takes a
    free port and no setting of the environment. Ctrl-C ends it with all its processes.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    # A shell without a terminal starts commands with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _walk(keep)


def _end(number: int, _: object) -> None:
    # As an exception, so that the server is stopped.
    sys.exit(128 + number)


def _walk(keep: bool) -> None:
    # numpy and aiohttp.
    from titopool.commands.own_server import own_server, without_settings
    from titopool.settings.gpus import visible_gpus

    words = ["--num-workers", "1"]
    if visible_gpus():
        # Beside what runs there already.
        words += ["--gpu-memory-utilization", "0.2"]
    _say("A server with a tiny random model starts, by `titopool serve`.")
    with tempfile.TemporaryFile("w+") as output:
        try:
            with own_server(
                words, environ=without_settings(), output=output, on_progress=_Phases()
            ) as server:
                _steps(server.client)
                if keep:
                    _say(f"The server goes on at {server.url}. Ctrl-C ends it.")
                    _wait_for_signal()
        except TitopoolError:
            output.seek(0)
            lines = output.read().splitlines()[-QUOTED_LINES:]
            print("\n".join(f"    {line}" for line in lines), file=sys.stderr)
            raise
    if not keep:
        print("\nThe server has ended. `titopool demo --keep` leaves it running.")


def _wait_for_signal() -> None:
    while True:
        time.sleep(3600)


class _Phases:
    """Prints each new phase of the worker, with the time since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown = "unreachable"

    def __call__(self, workers: "Iterable[WorkerStatus]") -> None:
        for one in workers:
            if one.phase != self._shown:
                self._shown = one.phase
                print(f"{time.monotonic() - self._began:6.1f} s  {one.phase}", flush=True)


# ---- the steps -----------------------------------------------------------------------


def _steps(client: "Client") -> None:
    ids = _tokenize(client)
    first = _generate(client, ids)
    _roll_out(client)
    if find_spec("torch") is None:
        _say("4. New weights: left out, because torch is not installed here.")
    else:
        _update(client, ids, first)
    _say(
        "How to go on\n"
        "  titopool serve MODEL            your model, a folder or a hub name\n"
        "  titopool status                 what its workers do\n"
        "  docs/trainers.md                TRL, verifiers, openai, plain HTTP, weights\n"
        "  examples/grpo.py                a model that learns through the server"
    )


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _call(line: str) -> None:
    print(f"  >>> {line}")


def _tokenize(client: "Client") -> Any:
    _say("1. Token ids in. A text becomes ids once, here or in your trainer.")
    _call(f'ids = client.tokenize("{PROMPT}")')
    ids = client.tokenize(PROMPT)
    print(f"  {ids.tolist()}")
    return ids


def _generate(client: "Client", ids: Any) -> Any:
    _say("2. Token ids out, each with its log-probability and the weights that sampled it.")
    _call("client.generate([ids], max_tokens=8, temperature=1.0, seed=1)")
    (result,) = client.generate([ids], max_tokens=8, temperature=1.0, seed=1)
    (found,) = result.completions
    print(f"  ids       {found.ids.tolist()}")
    assert found.logprobs is not None
    print(f"  logprobs  {[round(float(one), 2) for one in found.logprobs]}")
    print(f"  weights   version {found.weight_versions[0][0]}, {found.finish_reason}")
    return found.ids


def _roll_out(client: "Client") -> None:
    from titopool.rollouts.rollout import Rollout

    _say("3. A rollout of two turns. What was sampled is never tokenized again.")
    _call('rollout = Rollout(client, messages=[{"role": "user", "content": "What is 6 times 7?"}])')
    rollout = Rollout(client, messages=[{"role": "user", "content": "What is 6 times 7?"}])
    _call("rollout.generate(max_tokens=6)")
    rollout.generate(max_tokens=6, temperature=1.0, seed=1)
    _call('rollout.add({"role": "user", "content": "And 7 times 8?"})')
    rollout.add({"role": "user", "content": "And 7 times 8?"})
    _call("rollout.generate(max_tokens=6); arrays = rollout.arrays()")
    rollout.generate(max_tokens=6, temperature=1.0, seed=1)
    arrays = rollout.arrays()
    mask = "".join("#" if one else "." for one in arrays.loss_mask)
    print(f"  {len(arrays.ids)} ids; # the model wrote, . it did not:\n  {mask}")


def _update(client: "Client", ids: Any, before: Any) -> None:
    _say("4. New weights, as a trainer sends them after a step: one broadcast to all workers.")
    _call("with client.weights() as weights:")
    _call("    weights.update(model.named_parameters(), version=1)")
    tensors = _new_weights()
    began = time.monotonic()
    # On the CPU: a GPU may belong to the worker.
    with client.weights(device="cpu") as weights:
        weights.update(tensors, version=1, policy="keep")
    print(f"  {len(tensors)} tensors serve after {time.monotonic() - began:.2f} s")
    (result,) = client.generate([ids], max_tokens=8, temperature=1.0, seed=1)
    (found,) = result.completions
    print(f"  before    {before.tolist()}")
    print(f"  now       {found.ids.tolist()}, version {found.weight_versions[0][0]}")


def _new_weights() -> list[tuple[str, Any]]:
    """The demo model's tensors with noise, by name."""
    import torch
    from safetensors.torch import load_file

    from titopool.demo_model import demo_model_folder

    torch.manual_seed(0)
    found = load_file(Path(demo_model_folder()) / "model.safetensors")
    return [(name, one + NOISE * torch.randn_like(one)) for name, one in found.items()]
