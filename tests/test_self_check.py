"""What must hold of the sources themselves."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from titopool import config, errors

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path for folder in ("titopool", "app", "workers") for path in (REPOSITORY / folder).glob("*.py")
)
# Who may import whom, at the top of a module.
FORBIDDEN = {
    "titopool": {"app", "workers", "flask", "vllm", "torch", "transformers"},
    "app": {"workers", "vllm", "torch", "transformers"},
    "workers": {"app", "flask", "vllm", "torch", "transformers"},
}
# Modules that may import them inside functions.
HOLDERS = {
    "vllm": {
        "workers/adapters.py",
        "workers/engine.py",
        "workers/vllm_params.py",
        "workers/parsing.py",
        "workers/logprobs_transport.py",
        "workers/placing.py",
        "workers/weight_engine.py",
        "workers/weight_extension.py",
        "workers/weight_group.py",
        "workers/weight_reach.py",
        "workers/weight_reload.py",
    },
    "torch": {
        "titopool/demo_model.py",
        "titopool/weight_plan.py",
        "titopool/weights_client.py",
        "titopool/trainer_group.py",
        "titopool/nccl.py",
        "workers/images.py",
        "workers/weight_conversion.py",
        "workers/weight_copy.py",
        "workers/weight_extension.py",
        "workers/weight_group.py",
        "workers/weight_reach.py",
        "workers/weight_receiver.py",
        "workers/weight_reload.py",
        "workers/weight_sinks.py",
    },
    "transformers": {
        "titopool/demo_model.py",
        "app/tokenizer.py",
        "workers/images.py",
        "workers/weight_conversion.py",
    },
}


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def imported_by(nodes) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down_the_ladder(path: Path):
    tree = ast.parse(path.read_text())
    package = path.parent.name
    upward = imported_by(tree.body) & FORBIDDEN[package]
    assert not upward, f"{name_of(path)} imports {upward} at its top"
    for module in imported_by(ast.walk(tree)) & FORBIDDEN[package]:
        assert name_of(path) in HOLDERS.get(module, ()), f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_says_what_it_is_and_none_pickles(path: Path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "no module docstring"
    assert not imported_by(ast.walk(tree)) & {"pickle", "cloudpickle", "marshal"}


def test_every_setting_is_in_the_readme_with_its_default():
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (.*?) \|", (REPOSITORY / "README.md").read_text(), re.M)
    )
    for item in dataclasses.fields(config.ServerConfig):
        default = config.shown_default(item.name)
        assert rows.get(item.name) == (f"`{default}`" if default else ""), item.name
    assert set(rows) == set(config.SETTINGS)


def test_every_error_has_a_status_and_a_code_of_its_own():
    found = errors.all_error_types()
    assert len({error.code for error in found}) == len(found)
    table = errors.__doc__ or ""
    for error in found:
        assert f"  {error.code}" in table or error is errors.ConfigError, error
        assert 400 <= error.status < 600


def test_every_error_code_is_documented():
    text = (REPOSITORY / "docs" / "http.md").read_text()
    for error in errors.all_error_types():
        if error is not errors.ConfigError:
            assert f"| {error.status} | `{error.code}` |" in text, error.code
