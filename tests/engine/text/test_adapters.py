"""LoRA adapters over real vLLM, compared with transformers and merged weights."""

import concurrent.futures
import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from harness.servers import Server, running_server, wait_until, worker_pids
from tests.conftest import ENGINE_OPTIONS
from tests.kit.document_examples import blocks, filled_in, run_shell
from tests.kit.models import reference
from tests.kit.models.adapters import RANK, SCALE, TARGETS, make_adapter
from tests.kit.models.reference import TOLERANCE
from titopool import Client
from titopool.client.weights_client import WeightsError
from titopool.settings.gpus import visible_gpus

IDS = [42, 139, 14, 7, 99]
GREEDY = {"temperature": 0, "max_tokens": 8, "generation_kwargs": {"ignore_eos": True}}


class Adapted(NamedTuple):
    """A server with LoRA enabled, the folder of the adapters and the base model."""

    server: Server
    root: Path
    base: str

    def load(self, name: str, folder: str, **fields):
        body = {"lora_name": name, "lora_path": str(self.root / folder), **fields}
        return self.server.post("/v1/load_lora_adapter", body)

    def unload(self, name: str):
        return self.server.post("/v1/unload_lora_adapter", {"lora_name": name})

    def merged(self, folder: str) -> str:
        """Folder of the base model with the adapter merged into its weights."""
        return str(self.root / f"merged-{folder}")


@pytest.fixture(scope="module")
def adapted(tiny_model: str, tmp_path_factory: pytest.TempPathFactory):
    if visible_gpus():
        pytest.skip("on a GPU vLLM's kernels for adapters need bfloat16: benchmarks.weights --lora")
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three"), start=1):
        make_adapter(tiny_model, root, name, seed)
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-cpu-loras", "3")
    with running_server(
        tiny_model, *options, *ENGINE_OPTIONS, "--num-workers", "2", "--num-front-ends", "2",
        "--weights-root", str(root), log=tmp_path_factory.mktemp("adapters-server") / "log",
        num_workers=2,
    ) as server:  # fmt: skip
        yield Adapted(server, root, tiny_model)


def check(adapted: Adapted, answer: dict, folder: str, version: int) -> None:
    (ids,), model = answer["completion_ids"], adapted.merged(folder)
    assert ids == reference.greedy(model, IDS, 8)
    rows = reference.logprobs(model, IDS, ids)
    expected = [row[one].item() for row, one in zip(rows, ids, strict=True)]
    assert [one[0] for one in answer["logprobs"][0]] == pytest.approx(expected, abs=TOLERANCE)
    assert answer["lora_versions"] == [version]


def test_an_adapter_is_selected_by_name(adapted: Adapted):
    base = adapted.server.generate([IDS], **GREEDY)
    assert adapted.load("style", "one").json() == {"lora_name": "style", "version": 1}
    for _ in range(4):
        # Through either front end, at either worker.
        check(adapted, adapted.server.generate([IDS], lora_name="style", **GREEDY), "one", 1)
    assert adapted.server.generate([IDS], **GREEDY)["completion_ids"] == base["completion_ids"]
    assert "lora_versions" not in base
    client = openai.OpenAI(base_url=adapted.server.url + "/v1", api_key="none", max_retries=0)
    listed = {one.id: one for one in client.models.list().data}
    assert listed["style"].parent == adapted.base
    options = {"model": "style", "temperature": 0, "max_tokens": 8}
    extra = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}
    complete = client.completions.create(prompt=IDS, **options, **extra)
    chunks = list(client.completions.create(prompt=IDS, **options, **extra, stream=True))
    expected = reference.greedy(adapted.merged("one"), IDS, 8)
    assert complete.model == "style"
    assert complete.choices[0].token_ids == expected
    assert [i for one in chunks for i in one.choices[0].token_ids] == expected
    assert complete.choices[0].lora_version == 1
    assert {one.choices[0].lora_version for one in chunks} == {1}
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(messages=messages, **options, **extra)
    expected_chat = reference.greedy(adapted.merged("one"), chat.prompt_token_ids, 8)
    assert chat.choices[0].token_ids == expected_chat
    answer = adapted.server.post("/chat/", {"messages": [messages], "lora_name": "style", **GREEDY})
    assert answer.json()["completion_ids"] == [expected_chat]
    assert adapted.unload("style").json() == {"lora_name": "style", "version": 1}


def test_a_new_version_takes_over_while_requests_run_on_the_old_one(adapted: Adapted):
    assert adapted.load("replaced", "one").ok
    long = {**GREEDY, "max_tokens": 250, "lora_name": "replaced"}
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        old = [threads.submit(adapted.server.generate, [IDS] * 8, **long) for _ in range(2)]
        client = openai.OpenAI(base_url=adapted.server.url + "/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="replaced", prompt=IDS, max_tokens=250, stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        assert next(stream).choices[0].lora_version == 1
        wait_until(lambda: sum(adapted.server.metrics("sequences").values()) > 0, 10)
        assert adapted.load("replaced", "two").json()["version"] == 2
        check(adapted, adapted.server.generate([IDS], lora_name="replaced", **GREEDY), "two", 2)
        assert adapted.load("replaced", "three", version=7).json()["version"] == 7
        check(adapted, adapted.server.generate([IDS], lora_name="replaced", **GREEDY), "three", 7)
        assert {chunk.choices[0].lora_version for chunk in stream} == {1}
        expected = reference.greedy(adapted.merged("one"), IDS, 40)
        for answer in (one.result() for one in old):
            assert answer["lora_versions"] == [1] * 8
            assert [ids[:40] for ids in answer["completion_ids"]] == [expected] * 8
    assert adapted.unload("replaced").ok


def test_an_unloaded_adapter_is_not_found(adapted: Adapted):
    assert adapted.load("brief", "one").ok
    assert adapted.unload("brief").ok
    # A number that the server counts means one adapter.
    assert adapted.load("brief", "two").json()["version"] == 2
    assert adapted.unload("brief").json()["version"] == 2
    for path, body in (
        ("/generate/", {"prompts": [IDS], "lora_name": "brief"}),
        ("/v1/completions", {"prompt": IDS, "model": "brief"}),
        ("/v1/unload_lora_adapter", {"lora_name": "brief"}),
    ):
        answer = adapted.server.post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("fault", ["rank", "no-file", "garbage", "names", "outside"])
def test_a_bad_adapter_is_refused_and_the_old_one_still_serves(
    adapted: Adapted, tmp_path: Path, fault
):
    name = f"solid-{fault}"
    assert adapted.load(name, "one").ok
    folder = (tmp_path if fault == "outside" else adapted.root) / f"bad-{fault}"
    folder.mkdir(exist_ok=True)
    for file in (adapted.root / "two").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if fault == "rank":
        change_config(folder, r=64)
    elif fault == "no-file":
        (folder / "adapter_model.safetensors").unlink()
    elif fault == "garbage":
        (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    elif fault == "names":
        save_file({"base_model.model.nothing.lora_A.weight": torch.zeros(4, 4)},
                  folder / "adapter_model.safetensors")  # fmt: skip
    answer = adapted.load(name, str(folder))
    assert answer.status_code == 400, answer.text
    assert "lora_path" in answer.json()["error"]["message"]
    check(adapted, adapted.server.generate([IDS], lora_name=name, **GREEDY), "one", 1)
    assert adapted.unload(name).ok


def test_loading_a_known_version_or_one_adapter_too_many_is_a_conflict(adapted: Adapted):
    for name in ("a", "b", "c"):
        assert adapted.load(name, "one").ok
    full = adapted.load("d", "two")
    assert (full.status_code, full.json()["error"]["code"]) == (409, "conflict")
    assert "--max-cpu-loras" in full.json()["error"]["message"]
    assert adapted.unload("c").ok
    again = adapted.load("a", "two", version=1)
    assert again.status_code == 409
    check(adapted, adapted.server.generate([IDS], lora_name="a", **GREEDY), "one", 1)
    assert adapted.load("a", "two").json()["version"] == 2
    assert adapted.unload("a").ok
    assert adapted.unload("b").ok


def test_a_model_of_peft_is_sent_as_an_adapter(adapted: Adapted):
    base = AutoModelForCausalLM.from_pretrained(adapted.base, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=RANK * SCALE, target_modules=list(TARGETS))
    model = get_peft_model(base, config)
    folders = [str(adapted.root / f"sent-{version}") for version in (1, 2, 3)]
    with Client(adapted.server.url, timeout_s=120) as client, client.weights() as weights:
        for version in (1, 2):
            with torch.no_grad():
                for name, one in model.named_parameters():
                    if "lora_" in name:
                        one.normal_(std=0.1 * version)
            sent = weights.load_lora("sent", folders[version - 1], model=model)
            assert sent == {"lora_name": "sent", "version": version}
            (result,) = client.generate([IDS], lora_name="sent", max_tokens=8, ignore_eos=True)
            (done,) = result.completions
            ids = torch.tensor([IDS + done.ids.tolist()])
            with torch.inference_mode():
                rows = model(ids).logits[0, len(IDS) - 1 : -1].log_softmax(-1)
            expected = rows[range(8), ids[0, len(IDS) :]].tolist()
            assert done.logprobs.tolist() == pytest.approx(expected, abs=TOLERANCE)
        with pytest.raises(WeightsError, match=r"expected a new or an empty folder, got .*sent-2"):
            weights.load_lora("sent", folders[1], model=model)
        with pytest.raises(WeightsError, match="expected PEFT's PeftModel, got Qwen3ForCausalLM"):
            weights.load_lora("sent", folders[2], model=model.get_base_model())
        # Folders that are there need no model.
        assert weights.load_lora("again", folders[0])["version"] == 1
    assert adapted.unload("sent").ok
    assert adapted.unload("again").ok


def test_the_examples_of_the_documents_run(adapted: Adapted):
    """Those that tests/project/test_examples.py leaves out, in their order."""
    base = AutoModelForCausalLM.from_pretrained(adapted.base, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, target_modules=list(TARGETS)))
    defined, ran = {"model": model}, []
    for block in blocks(run=False):
        if "lora" not in block.code:
            continue
        code = filled_in(block.code, adapted.server, "").replace("/weights", str(adapted.root))
        if block.language == "sh":
            # The version is loaded already.
            assert adapted.unload("math").ok
            assert json.loads(run_shell(code)) == {"lora_name": "math", "version": 7}
        else:
            exec(compile(code, str(block), "exec"), defined)
        ran.append(str(block).rpartition("-")[0])
    assert ran == ["docs/trainers.md"] * 3
    assert adapted.server.generate([IDS], lora_name="math", **GREEDY)["lora_versions"] == [7]
    assert adapted.unload("math").ok


@pytest.mark.skipif(bool(visible_gpus()), reason="vLLM's CPU build only")
@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": IDS, "prompt_logprobs": 1}),
        ("/get_sequence_logprobs/", {"sequences": [IDS], "prompt_lengths": [1]}),
    ],
)
def test_prompt_logprobs_are_refused_with_adapters_on_a_cpu(adapted: Adapted, path, body):
    """vLLM's engine dies when a step that scores a prompt has other requests too."""
    answer = adapted.server.post(path, body)
    assert answer.status_code == 400
    assert "--enable-lora" in answer.json()["error"]["message"]


def test_a_server_without_lora_refuses_to_load_an_adapter(server: Server):
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"})
    assert answer.status_code == 400
    assert "--enable-lora" in answer.json()["error"]["message"]


def test_a_restarted_worker_loads_the_adapters_again(adapted: Adapted):
    assert adapted.load("lasting", "one").ok
    assert adapted.load("lasting", "two").ok
    os.kill(worker_pids(adapted.server)[0], signal.SIGKILL)
    wait_until(lambda: adapted.server.get("/ready").json()["num_ready"] == 1, 20)
    adapted.server.wait_until_ready(2)
    for _ in range(4):
        check(adapted, adapted.server.generate([IDS], lora_name="lasting", **GREEDY), "two", 2)
    assert adapted.unload("lasting").ok
