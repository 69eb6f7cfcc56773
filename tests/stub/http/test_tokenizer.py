"""The front end uses the tokenizer of the model that the workers serve now."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import requests

import app.inputs.tokenizer
from app.inputs.tokenizer import TokenizerLoader
from harness.servers import REPOSITORY, Server, front_ends, wait_until
from tests.conftest import StartStub
from tests.kit.workers.pools import FACTS
from titopool.demo_model import make_tokenizer
from titopool.wire.messages import WorkerFacts
from workers.engine.facts import digest_of_tokenizer

# As MiniCPM-o has it.
OWN_CONFIG = """
import transformers.modeling_utils
from transformers import PreTrainedConfig

class OwnConfig(PreTrainedConfig):
    model_type = "own"
"""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tokenizers loaded so far."""
    names: list[str] = []

    def load(facts: WorkerFacts, leaves_out_torch: bool, chat_template: str | None) -> str:
        names.append(facts.tokenizer + facts.tokenizer_digest)
        return names[-1]

    monkeypatch.setattr(app.inputs.tokenizer, "load", load)
    return names


def use(loader: TokenizerLoader, facts: WorkerFacts) -> str:
    return loader.use(str, facts=facts, timeout_s=5)


def test_a_new_model_of_the_pool_loads_its_tokenizer(loaded: list[str]):
    loader = TokenizerLoader()
    old, new = (msgspec.structs.replace(FACTS, tokenizer=name) for name in ("old", "new"))
    assert [use(loader, one) for one in (old, old, new, new)] == ["old", "old", "new", "new"]
    assert loaded == ["old", "new"]
    loader.token_texts[5] = "of new"
    loader.prepare(old, timeout_s=5)
    assert loader.token_texts == {}
    assert loaded[-1] == "old"


def test_replaced_files_in_a_folder_load_the_tokenizer_again(loaded: list[str], tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    first = digest_of_tokenizer(str(tmp_path))
    (tmp_path / "model.safetensors").write_text("other weights")
    assert digest_of_tokenizer(str(tmp_path)) == first
    (tmp_path / "tokenizer.json").write_text('{"other": 1}')
    second = digest_of_tokenizer(str(tmp_path))
    assert second != first
    assert digest_of_tokenizer("hub/name") == ""
    loader = TokenizerLoader()
    for digest in (first, second):
        use(loader, msgspec.structs.replace(FACTS, tokenizer="t", tokenizer_digest=digest))
    assert loaded == [f"t{first}", f"t{second}"]


@pytest.mark.parametrize(
    "is_there, has_torch",
    [
        (True, True), (False, False),
        pytest.param(True, False, marks=pytest.mark.variant),
        pytest.param(False, True, marks=pytest.mark.variant),
    ],
)  # fmt: skip
def test_the_collector_visits_nothing_of_what_the_tokenizer_imported(
    is_there: bool, has_torch: bool, tmp_path: Path
):
    if is_there:
        make_tokenizer(tmp_path)
    # In a process that has imported nothing of it, as a front end. torch alone has 300,000 objects.
    code = """if True:
        import contextlib, gc, msgspec, sys
        from app.inputs.tokenizer import load
        from tests.kit.workers.pools import FACTS

        gc.freeze()
        print("torch" in sys.modules)
        with contextlib.suppress(Exception):
            kept = load(msgspec.structs.replace(FACTS, tokenizer=sys.argv[1]), not int(sys.argv[2]))
        is_loaded = "kept" in globals()
        print(is_loaded, "torch" in sys.modules, len(gc.get_objects()) < 20_000, gc.isenabled())
    """
    words = [sys.executable, "-c", code, str(tmp_path), str(int(has_torch))]
    printed = subprocess.run(words, cwd=REPOSITORY, text=True, check=True, capture_output=True)
    assert printed.stdout.split() == ["False", str(is_there), str(has_torch), "True", "True"]
    assert "PyTorch" not in printed.stderr


def test_a_models_own_code_may_import_transformers_models(tmp_path: Path):
    make_tokenizer(tmp_path)
    (tmp_path / "own.py").write_text(OWN_CONFIG)
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").unlink()
    code = """if True:
        import msgspec, sys
        from app.inputs.tokenizer import load
        from tests.kit.workers.pools import FACTS

        facts = msgspec.structs.replace(FACTS, tokenizer=sys.argv[1], trust_remote_code=True)
        print(load(facts, True).decode([5]))
        print("transformers.modeling_utils" in sys.modules)
    """
    words = [sys.executable, "-c", code, str(tmp_path)]
    printed = subprocess.run(words, cwd=REPOSITORY, text=True, check=True, stdout=subprocess.PIPE)
    assert printed.stdout.splitlines()[-1] == "True"


def test_a_front_end_has_no_torch(
    start_stub: StartStub, start_server: Callable[..., Server], tiny_model: str, tmp_path: Path
):
    """Not of a fork, which has what its parent imported."""
    start_stub(0, "--tokenizer", tiny_model)
    server = start_server("--endpoints", f"ipc://{tmp_path}/worker-0")
    server.wait_until_ready(1)
    answer = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    processes = psutil.Process(server.process.pid).children()
    front_ends = [one for one in processes if "gunicorn: worker" in " ".join(one.cmdline())]
    libraries = [Path(f"/proc/{one.pid}/maps").read_text() for one in front_ends]
    assert any("tokenizers" in one for one in libraries)
    assert not any("libtorch" in one for one in libraries)


def test_the_operator_s_chat_template_stands_in_place_of_the_model_s(
    start_stub: StartStub, stub_server: Callable[..., Server], tmp_path: Path
):
    make_tokenizer(tmp_path)
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    start_stub(0, "--tokenizer", str(tmp_path))
    server = stub_server(1, "--num-front-ends", "2", "--chat-template", str(file))
    chat = {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": False}

    def rendered(session: requests.Session) -> str:
        ids = session.post(f"{server.url}/tokenize", json=chat).json()["tokens"]
        answer = session.post(f"{server.url}/detokenize", json={"tokens": ids}).json()
        return str(answer["prompt"])

    before = front_ends(server)
    assert [rendered(session) for session in before.values()] == ["<user>Hello"] * 2
    # A front end that is forked later has the template of the start, as the others have.
    file.write_text("other")
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, before)), 20)
    after = front_ends(server)
    assert [rendered(session) for session in after.values()] == ["<user>Hello"] * 2
