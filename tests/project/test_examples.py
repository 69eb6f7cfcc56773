"""All examples in the documents and in examples/ run against one real server.

A fenced python or sh block in `DOCUMENTS` runs with the server's URL, a free port and a weights
folder substituted. A block that cannot run here is marked `not-run` after its language and has a
reason in `NOT_RUN`.

Without a GPU, TRL's weight update uses gloo instead of NCCL (`tests/kit/trainers/trl_weights_client.py`).
"""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from harness.servers import REPOSITORY, Server, environment, need_gpus
from tests.kit.document_examples import BLOCK, DOCUMENTS, Block, blocks, filled_in, run_shell
from tests.kit.models.weights import weights_client
from tests.kit.peers.trl_client import run_trl
from tests.kit.peers.verifiers_rollouts import forks as verifiers_forks
from tests.kit.trainers.trainer import DEVICE, tensors_of
from tests.kit.trainers.trl_weights_client import run_trl_weights
from titopool.client.weights_client import WeightsClient

# Text of a block that does not run: the reason.
NOT_RUN = {
    "titopool status --watch": "ends by Ctrl-C; tests/commands/test_running_server_commands.py runs it",
    "make serve": "installs; tests/commands/test_command.py starts the server",
    "make install": "installs; tests/commands/test_command.py starts the server",
    "docker compose": "needs a Docker engine; tests/all/compose runs it",
    "kubectl": "needs a cluster; tests/all/system/test_kubernetes.py checks the manifests",
    "sbatch": "needs Slurm; tests/all/system/test_slurm.py submits the script",
    "--cluster ray": "needs a Ray cluster; tests/all/ray/test_ray.py runs it",
    "RayServer": "needs a Ray cluster; tests/all/ray/test_ray.py runs it",
    "titopool doctor": "needs several hosts; tests/all/system/test_hosts.py runs it",
    "NCCL_SOCKET_IFNAME": "names an interface of the reader's host",
    "titopool mismatch": "downloads a model; tests/engine/text/test_mismatch.py runs it with a tiny one",
    "python -P -m workers": "needs several hosts; tests/commands/test_standalone_worker.py runs one worker",
    "AREAL_LLM_SERVER_ADDRS": "a setting of AReaL; tests/clients/test_areal.py calls its client",
    "rllm-model-gateway": "needs rLLM",
    "lora": "needs an engine with adapters; tests/engine/text/test_adapters.py runs it",
}
TRL_VERSION = "1.9.2"
NOWHERE = "http://127.0.0.1:9"
# `run_trl` reads the last line as JSON.
NO_ANSWER = "print('null')"


@pytest.fixture(scope="module")
def example_server(single_server: Server, tiny_model: str) -> Iterator[Server]:
    """The shared `single_server`; its weights and their version are restored afterwards."""
    yield single_server
    single_server.post("/resume", {})
    client = weights_client(single_server)
    client.update(tensors_of(tiny_model), policy="abort", version=0)
    client.close()


@pytest.fixture(scope="module")
def names() -> dict[str, dict[str, Any]]:
    """Names that the Python blocks of each document define; its later blocks use them."""
    return {document: {} for document in DOCUMENTS}


@pytest.fixture(scope="module")
def trained(tiny_model: str) -> dict[str, Any]:
    """Names that an example expects from the training loop around it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").to(DEVICE)
    return {"model": model, "step": 0, "rank": 0}


@pytest.mark.parametrize("block", list(blocks(run=True)), ids=str)
def test_block_runs(
    example_server: Server,
    tiny_model: str,
    trained: dict[str, Any],
    names: dict[str, dict[str, Any]],
    block: Block,
):
    code = filled_in(block.code, example_server, tiny_model)
    if block.loads_weights:
        need_gpus(2)
    if block.language == "sh":
        run_shell(code)
    elif "init_communicator" in code:
        setup = f"model = module({tiny_model!r})\n"
        run_trl_weights(TRL_VERSION, example_server.url, f"{setup}{code}\n{NO_ANSWER}")
    elif "from trl" in code:
        run_trl(TRL_VERSION, example_server.url, f"{code}\n{NO_ANSWER}")
    elif "import verifiers" in code:
        verifiers_forks().run(code)
    else:
        defined = names[block.document]
        if block.loads_weights:
            defined |= trained
        exec(compile(code, str(block), "exec"), defined)
        if isinstance(client := defined.get("client"), WeightsClient):
            # Frees the session for the next block, as the end of a trainer's process does.
            client.close()


def test_every_block_that_does_not_run_has_a_reason():
    skipped = [block.code for block in blocks(run=False)]
    for code in skipped:
        assert any(words in code for words in NOT_RUN), code
    for words in NOT_RUN:
        assert any(words in code for code in skipped), words


def test_the_readmes_first_response_has_the_current_fields_and_ids(example_server: Server):
    (shown,) = [
        code for language, _, code in BLOCK.findall((REPOSITORY / "README.md").read_text())
        if language == "json"
    ]  # fmt: skip
    answer = example_server.generate(["Hello, world"], max_tokens=8)
    assert set(re.findall(r'"(\w+)":', shown)) <= set(answer)
    first_ids = re.findall(r"\d+", shown[: shown.index("…")])
    assert answer["prompt_ids"][0][: len(first_ids)] == [int(one) for one in first_ids]


@pytest.mark.parametrize(
    "words, expected",
    [
        pytest.param(["generate.py", NOWHERE], f"{NOWHERE}: no server answers", id="generate"),
        pytest.param(["generate_binary.py", NOWHERE], f"{NOWHERE}: no server answers", id="binary"),
        pytest.param(["generate_images.py"], "expected a picture, got none; python", id="no-picture"),
        pytest.param(["generate_images.py", "/no"], "expected a picture, got /no: No such", id="no-file"),
        pytest.param(["generate_images.py", __file__, NOWHERE], "no server answers", id="images"),
    ],
)  # fmt: skip
def test_an_example_without_a_server_says_so_in_one_line(words, expected, monkeypatch, capsys):
    """In this process, which has imported transformers."""
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPOSITORY / "examples" / words[0]), run_name="__main__")
    # Python prints a text to stderr and ends with 1.
    text = ended.value.code
    assert isinstance(text, str)
    assert expected in text
    assert len(text.splitlines()) == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["generate", "generate_binary"])
def test_example_runs(example_server: Server, name: str):
    """`generate_images` needs a vision-language model: tests/engine/images/test_images.py runs it."""
    result = subprocess.run(
        [sys.executable, f"examples/{name}.py", example_server.url],
        env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" -> ") == 4


def test_the_example_of_rollouts_runs(example_server: Server):
    """Four rollouts of three turns; the tool answers the first two."""
    result = subprocess.run(
        [sys.executable, "examples/rollout.py", example_server.url],
        env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("assistant -> <tool_call>") == 12
    assert len(re.findall(r"^tool -> \d+$", result.stdout, re.M)) == 8
