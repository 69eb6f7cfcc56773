"""Calls of two trainers as data, and the HTTP requests made from them."""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.all.fuzz.stub import FIRST, LAST, NEVER, REFUSED

POLICIES = ("keep", "drain", "abort")
ADAPTERS = ("one", "two")
WORLD_SIZE = 3
# Lists of tensor names that a trainer announces: complete, partial, with a name that the engine
# refuses, with a tensor that is never sent.
NAMES = ((FIRST, LAST), (FIRST,), (LAST,), (REFUSED, LAST), (NEVER, LAST))


class Call(NamedTuple):
    """One call of one trainer; `choices` select its variant."""

    kind: str
    trainer: int = 0
    choices: tuple[int, ...] = (0, 0)


@dataclass
class Trainer:
    """A trainer's session and update, and the socket it listens on while it lives."""

    session: str
    listening: socket.socket = field(
        default_factory=lambda: socket.create_server(("127.0.0.1", 0), backlog=1024)
    )
    update: str = "none"
    # The remaining calls of the update in progress.
    plan: list["Call"] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.listening.getsockname()[1])

    def next_call(self, trainer: int, choices: tuple[int, ...]) -> Call:
        """The next call of a planned update; starts a new plan if none is in progress."""
        if not self.plan:
            self.plan = [one._replace(trainer=trainer) for one in _pick(PLANS, choices[0])]
        return self.plan.pop(0)


class HttpCall(NamedTuple):
    """One call as an HTTP request."""

    method: str
    path: str
    body: Any = None


MakeHttpCall = Callable[[Trainer, tuple[int, ...], Path], HttpCall]


def _pick(values: tuple[Any, ...], choice: int) -> Any:
    return values[choice % len(values)]


def _init(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    session = trainer.session if choices[0] % 4 else "shared"
    body = {"session": session, "backend": "gloo", "host": "127.0.0.1", "port": trainer.port}
    return HttpCall("POST", "/weights/init", {**body, "world_size": WORLD_SIZE})


def _begin(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    names = list(_pick(NAMES, choices[0]))
    body = {
        "session": trainer.session, "names": names, "dtypes": ["float32"] * len(names),
        "shapes": [[2, 2]] * len(names), "partial": bool(choices[1] % 2),
        "version": _pick((None, None, 3, 0), choices[1]),
    }  # fmt: skip
    return HttpCall("POST", "/weights/begin", body)


def _commit(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    checksum = _pick((False, True, "0" * 16, "f" * 16), choices[1])
    body = {"update": trainer.update, "policy": _pick(POLICIES, choices[0]), "checksum": checksum}
    return HttpCall("POST", "/weights/commit", body)


def _abort(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/weights/abort", {"update": trainer.update})


def _close(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/weights/close", {"session": trainer.session})


def _accept(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/weights/accept", {})


def _folder(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    name, policy = _pick((*ADAPTERS, "missing"), choices[0]), _pick(POLICIES, choices[1])
    return HttpCall("POST", "/update_weights", {"path": str(root / name), "policy": policy})


def _trl_init(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    body = {"host": "127.0.0.1", "port": trainer.port, "world_size": WORLD_SIZE}
    uuid = _pick(("", f"GPU-{trainer.session}"), choices[0])
    return HttpCall("POST", "/init_communicator", {**body, "client_device_uuid": uuid})


def _trl_tensor(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    name = _pick((FIRST, LAST, FIRST, LAST, REFUSED), choices[0])
    return HttpCall("POST", "/update_named_param", {"name": name, "dtype": "float32", "shape": [2]})


def _trl_end(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/reset_prefix_cache")


def _trl_close(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/close_communicator")


def _stock_init(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    info = {
        "master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1,
        "world_size": WORLD_SIZE, "backend": "gloo", "packed": bool(choices[1] % 2),
    }  # fmt: skip
    return HttpCall("POST", "/init_weight_transfer_engine", {"init_info": info})


def _stock_start(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/start_weight_update", {})


def _stock_list(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    names = list(_pick((*NAMES, ()), choices[0]))
    num = len(names)
    info = {"names": names, "dtype_names": ["float32"] * num, "shapes": [[2, 2]] * num}
    return HttpCall("POST", "/update_weights", {"update_info": info})


def _stock_finish(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    body = _pick((None, {}, {"weight_version": f"step-{choices[1]}"}), choices[0])
    return HttpCall("POST", "/finish_weight_update", body)


def _stock_close(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/shutdown_weight_transfer_engine")


def _stock_pause(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", f"/pause?mode={_pick(('keep', 'wait', 'abort'), choices[0])}")


def _caches(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", _pick(("/reset_mm_cache", "/reset_encoder_cache"), choices[0]))


def _label(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/update_weight_version", {"new_version": f"label-{choices[0]}"})


def _aborts(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/abort_requests", {"request_ids": ["none"]})


def _pause(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    lease_s = _pick((0.05, 0.3, 0.6), choices[1])
    return HttpCall("POST", "/pause", {"mode": _pick(POLICIES, choices[0]), "lease_s": lease_s})


def _resume(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/resume")


def _is_paused(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("GET", "/is_paused")


def _status(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("GET", _pick(("/weights", "/ready", "/v1/models", "/metrics"), choices[0]))


def _load(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    name = _pick(ADAPTERS, choices[0])
    version = _pick((None, None, None, 1, 5), choices[1])
    body = {"lora_name": name, "lora_path": str(root / name), "version": version}
    return HttpCall("POST", "/v1/load_lora_adapter", body)


def _unload(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    return HttpCall("POST", "/v1/unload_lora_adapter", {"lora_name": _pick(ADAPTERS, choices[0])})


def _generate(trainer: Trainer, choices: tuple[int, ...], root: Path) -> HttpCall:
    name = _pick((None, None, *ADAPTERS), choices[0])
    prompts = [[1, 2, choices[1]]] * (1 + choices[1] % 3)
    return HttpCall("POST", "/generate", {"prompts": prompts, "lora_name": name})


KINDS: dict[str, MakeHttpCall] = {
    "init": _init, "begin": _begin, "commit": _commit, "abort": _abort, "close": _close,
    "accept": _accept, "folder": _folder, "trl_init": _trl_init, "trl_tensor": _trl_tensor,
    "trl_end": _trl_end, "trl_close": _trl_close, "pause": _pause, "resume": _resume,
    "is_paused": _is_paused, "status": _status, "load": _load, "unload": _unload,
    "generate": _generate, "stock_init": _stock_init, "stock_start": _stock_start,
    "stock_list": _stock_list, "stock_finish": _stock_finish, "stock_close": _stock_close,
    "stock_pause": _stock_pause, "caches": _caches, "label": _label, "aborts": _aborts,
}  # fmt: skip
# Complete updates, and some that end early.
PLANS = (
    (Call("init", choices=(1, 0)), Call("begin"), Call("commit")),
    (Call("init", choices=(1, 0)), Call("begin"), Call("commit", choices=(1, 1))),
    (Call("init", choices=(1, 0)), Call("begin", choices=(1, 1)), Call("commit", choices=(2, 0))),
    (Call("init", choices=(1, 0)), Call("begin", choices=(4, 0)), Call("commit")),
    (Call("init", choices=(1, 0)), Call("begin"), Call("abort")),
    (Call("trl_init"), Call("trl_tensor"), Call("trl_tensor", choices=(1, 0)), Call("trl_end")),
    (
        Call("trl_init", choices=(1, 0)), Call("trl_tensor"), Call("trl_tensor", choices=(1, 0)),
        Call("trl_tensor"), Call("trl_tensor", choices=(1, 0)), Call("trl_close"),
    ),
    (Call("trl_init"), Call("trl_tensor", choices=(1, 0)), Call("trl_tensor", choices=(4, 0))),
    (Call("stock_init"), Call("stock_start"), Call("stock_list"), Call("stock_finish")),
    (
        Call("stock_init"), Call("stock_start"), Call("stock_list", choices=(1, 0)),
        Call("stock_list", choices=(2, 0)), Call("stock_finish", choices=(2, 3)), Call("trl_end"),
        Call("stock_start"), Call("stock_list", choices=(5, 0)), Call("stock_finish"),
    ),
    (Call("stock_init"), Call("stock_start"), Call("stock_list", choices=(4, 0))),
    (Call("stock_init"), Call("stock_start"), Call("stock_list"), Call("stock_close")),
)  # fmt: skip
NEXT = "next"
_choices = st.tuples(st.integers(0, 7), st.integers(0, 7))
calls = st.builds(
    Call, st.sampled_from((*[NEXT] * 12, *sorted(KINDS))), st.integers(0, 1), _choices
)


def make_folders(root: Path) -> None:
    """Writes weights and adapters for the calls that name a folder."""
    for name in ADAPTERS:
        (root / name).mkdir(parents=True)
        (root / name / "weights").write_text(name)
        (root / name / "adapter_config.json").write_text(json.dumps({"r": 8}))
        (root / name / "adapter_model.safetensors").write_text(name)
