"""Rules about the source code itself."""

import ast
import re
from pathlib import Path

from tests.conftest import SHARED_SERVERS, STARTING_FIXTURES, STARTING_FUNCTIONS
from titopool import errors
from titopool.settings.config import SETTINGS
from tools.settings_page import PAGE, settings_page

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("titopool", "app", "workers")
    for path in (REPOSITORY / folder).rglob("*.py")
)
# Statements of each folder at most.
SIZES = {
    "app": 679,
    "app.anthropic": 366,
    "app.call": 1045,
    "app.control": 176,
    "app.conversations": 765,
    "app.counts": 265,
    "app.http": 1048,
    "app.inputs": 771,
    "app.openai": 476,
    "app.operators": 695,
    "app.outputs": 390,
    "app.pool": 1967,
    "app.responses": 460,
    "app.route": 828,
    "app.sessions": 218,
    "app.sglang": 549,
    "app.trl": 365,
    "app.vllm": 345,
    "app.vllm_rl": 343,
    "app.weights": 310,
    "titopool": 503,
    "titopool.answers": 345,
    "titopool.client": 1620,
    "titopool.commands": 661,
    "titopool.conversations": 751,
    "titopool.helpers": 290,
    "titopool.mismatch": 224,
    "titopool.rollouts": 958,
    "titopool.settings": 861,
    "titopool.wire": 953,
    "workers": 687,
    "workers.cluster": 302,
    "workers.engine": 2189,
    "workers.images": 410,
    "workers.in_model": 2703,
    "workers.serving": 1462,
    "workers.supervisor": 1187,
    "workers.weights": 1236,
}
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
# Packages that a package's modules must not import at their top.
FORBIDDEN = {
    "titopool": {"app", "workers", "flask", "vllm", "torch", "transformers"},
    "app": {"workers", "vllm", "torch", "transformers"},
    "workers": {"app", "flask", "vllm", "torch", "transformers"},
}
# Modules that may import these packages inside functions.
HOLDERS = {
    "vllm": {
        "workers/engine/lora.py",
        "workers/engine/facts.py",
        "workers/engine/grammars/process.py",
        "workers/engine/start/exact.py",
        "workers/engine/start/importing.py",
        "workers/engine/start/options.py",
        "workers/engine/vllm.py",
        "workers/engine/metrics/stat_logger.py",
        "workers/engine/sampling.py",
        "workers/engine/parsing/thoughts.py",
        "workers/engine/parsing/parsers.py",
        "workers/in_model/logprobs_patch.py",
        "workers/in_model/vllm_fixes.py",
        "workers/images/exchange.py",
        "workers/images/placeholders.py",
        "workers/engine/sent_images.py",
        "workers/engine/weights.py",
        "workers/in_model/served_model.py",
        "workers/in_model/receiving/group.py",
        "workers/in_model/proof/dry_runs.py",
        "workers/in_model/load/reload.py",
    },
    "torch": {
        "titopool/commands/demo.py",
        "titopool/demo_model.py",
        "titopool/mismatch/trainer.py",
        "titopool/wire/weight_plan.py",
        "titopool/client/weights_client.py",
        "titopool/client/weights/packing.py",
        "titopool/client/weights/adapters.py",
        "titopool/client/weights/sources.py",
        "titopool/client/weights/trainer_group.py",
        "titopool/client/weights/nccl.py",
        "workers/doctor.py",
        "workers/images/exchange.py",
        "workers/images/preparer.py",
        "workers/in_model/proof/conversion.py",
        "workers/in_model/load/copies.py",
        "workers/in_model/load/loader.py",
        "workers/in_model/logprobs_patch.py",
        "workers/in_model/vllm_fixes.py",
        "workers/in_model/served_model.py",
        "workers/in_model/receiving/group.py",
        "workers/in_model/proof/coverage.py",
        "workers/in_model/proof/dry_runs.py",
        "workers/in_model/peers/model_bytes.py",
        "workers/in_model/peers/offer.py",
        "workers/in_model/receiving/receiver.py",
        "workers/in_model/receiving/host_memory.py",
        "workers/in_model/receiving/staging.py",
        "workers/in_model/load/reload.py",
    },
    "transformers": {
        "titopool/demo_model.py",
        "titopool/mismatch/trainer.py",
        "titopool/rollouts/tools.py",
        "app/inputs/tokenizer.py",
        "workers/images/preparation.py",
        "workers/in_model/proof/conversion.py",
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


def test_forbidden_packages_are_not_imported():
    found = []
    for path, tree in TREES.items():
        name, forbidden = name_of(path), FORBIDDEN[path.relative_to(REPOSITORY).parts[0]]
        found += [f"{name} imports {one} at its top" for one in imported_by(tree.body) & forbidden]
        found += [
            f"{name} imports {one}"
            for one in imported_by(ast.walk(tree)) & forbidden
            if name not in HOLDERS.get(one, ())
        ]
    assert not found


# Folders from the top of the ladder to its bottom: a module imports from its own folder and from
# folders below. A module outside these folders counts as a folder of its own; one that is not
# listed stands above all.
LADDERS = {
    "titopool": [
        "rollouts", "conversations", "client", "settings", "wire", "answers", "helpers", "deadline", "secret_files",
        "errors", "release",
    ],
    "app": [
        "control", "call", "conversations", "inputs", "outputs", "pool", "route", "http",
        "counts", "draining", "json_structure", "shared_database", "time_slices",
    ],
    "workers": [
        "serving", "weights", "engine", "in_model", "images", "cluster", "supervisor", "process",
        "environment", "ledger", "vllm_internals", "forks", "shared_calls",
    ],
}  # fmt: skip
# Folders of `app` that each know one protocol. They stand beside each other, below `generate`, which
# is the one path of two of them, and above what they share.
PROTOCOLS = (
    "trl",
    "openai",
    "responses",
    "anthropic",
    "vllm",
    "vllm_rl",
    "sglang",
    "weights",
    "sessions",
    "operators",
)
# Keeps a folder's list of files readable as its table of contents.
MAX_MODULES = 12


def ladder_position(module: str) -> tuple[str, int]:
    """The root package of a dotted name, and its depth in the ladder, counted from the top."""
    root, _, rest = module.partition(".")
    ladder, room = LADDERS[root], rest.partition(".")[0]
    return root, ladder.index(room) + 1 if room in ladder else 0


def modules_imported_by(path: Path) -> set[str]:
    """Dotted names of titopool's modules that a module imports, inside functions too."""
    names = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = REPOSITORY / node.module.replace(".", "/") / alias.name
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                names.add(f"{node.module}.{alias.name}" if is_module else node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.partition(".")[0] in LADDERS}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def test_modules_import_only_from_folders_below():
    found = []
    for path in SOURCES:
        root, depth = ladder_position(module_of(path))
        for name in modules_imported_by(path):
            imported_root, imported_depth = ladder_position(name)
            if imported_root == root and imported_depth < depth:
                found.append(f"{name_of(path)} imports {name}")
    assert not found


def test_no_import_cycle():
    imports = {module_of(path): modules_imported_by(path) for path in SOURCES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " imports ".join([*way[way.index(module) :], module])
        if module not in done:
            for name in imports.get(module, ()):
                visit(name, (*way, module))
            done.add(module)

    for module in imports:
        visit(module, ())


def test_protocols_know_nothing_of_each_other():
    found = []
    for path in SOURCES:
        room = module_of(path).partition("app.")[2].partition(".")[0]
        for name in modules_imported_by(path):
            used = name.partition("app.")[2].partition(".")[0]
            is_above = room in ("", "generate", *PROTOCOLS)
            if used in PROTOCOLS and used != room and (room in PROTOCOLS or not is_above):
                found.append(f"{name_of(path)} imports {name}")
    assert not found


def test_a_name_means_one_class():
    """Components of `/openapi.json` have the names of their classes."""
    found: dict[str, list[str]] = {}
    for path, tree in TREES.items():
        if path.is_relative_to(REPOSITORY / "app"):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(name_of(path))
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


# Every protocol may have modules of these names.
SHARED_STEMS = {"__init__", "bodies", "answers", "routes", "stream"}


def test_a_module_of_the_front_end_has_a_name_of_its_own():
    stems = [path.stem for path in SOURCES if path.is_relative_to(REPOSITORY / "app")]
    repeated = {one for one in stems if stems.count(one) > 1} - SHARED_STEMS
    assert not repeated


def test_packages_are_small_and_say_where_they_run():
    found = []
    for folder in {path.parent for path in SOURCES}:
        modules = [one.stem for one in folder.glob("*.py") if one.stem != "__init__"]
        if len(modules) > MAX_MODULES:
            found.append(f"{name_of(folder)} has {len(modules)} modules: {modules}")
        about = ast.get_docstring(TREES[folder / "__init__.py"]) or ""
        if folder.parent != REPOSITORY and "Runs in: " not in about:
            found.append(f"{name_of(folder)} does not say where it runs")
    assert not found


def statements_of(tree: ast.AST) -> int:
    """Statements without docstrings."""
    texts = (ast.Constant, ast.JoinedStr)
    return sum(
        isinstance(one, ast.stmt)
        and not (isinstance(one, ast.Expr) and isinstance(one.value, texts))
        for one in ast.walk(tree)
    )


def test_no_room_grows_unseen():
    """A bound rises only in the commit of a feature, which says by how much."""
    found: dict[str, int] = {}
    for path, tree in TREES.items():
        room = ".".join(module_of(path).split(".")[:2])
        name = room if (REPOSITORY / room.replace(".", "/")).is_dir() else room.partition(".")[0]
        found[name] = found.get(name, 0) + statements_of(tree)
    assert found == {name: min(found.get(name, 0), bound) for name, bound in SIZES.items()}


def test_nothing_imports_from_a_module_of_tests():
    """What two modules share has a module beside both, named for what it is."""
    found = []
    for path in (
        path
        for root in ("tests", "harness", "benchmarks", "tools")
        for path in (REPOSITORY / root).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            is_from = isinstance(node, ast.ImportFrom) and bool(node.module)
            if is_from and node.module.rpartition(".")[2].startswith("test_"):
                found.append(f"{name_of(path)}:{node.lineno} imports from {node.module}")
    assert not found


def test_unit_tests_start_no_server():
    starting = STARTING_FUNCTIONS | STARTING_FIXTURES | set(SHARED_SERVERS)
    found = []
    for path in (REPOSITORY / "tests" / "unit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names = {one.arg for one in node.args.args}
            else:
                continue
            found += [f"{name_of(path)}:{node.lineno} has {one}" for one in names & starting]
    assert not found


def test_every_module_has_a_docstring_and_none_pickles():
    found = []
    for path, tree in TREES.items():
        if not ast.get_docstring(tree):
            found.append(f"{name_of(path)} has no docstring")
        pickles = imported_by(ast.walk(tree)) & {"pickle", "cloudpickle", "marshal"}
        found += [f"{name_of(path)} imports {one}" for one in pickles]
    assert not found


def test_the_settings_page_matches_the_code():
    assert PAGE.read_text() == settings_page(), "run `make docs`"


def test_each_setting_s_help_is_short():
    """The help fits into a table cell: at most two sentences, and no line break."""
    texts = {name: one.metadata["help"] for name, one in SETTINGS.items()}
    found = [
        name
        for name, text in texts.items()
        if len(re.split(r"(?<=\.) ", text)) > 2
        or not text.endswith(".")
        or len(text) > 160
        or set(text) & set("|\n")
    ]
    assert not found


def test_every_error_has_its_own_status_and_code():
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
