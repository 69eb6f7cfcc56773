"""LoRA adapters: `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM's server.

Other than there, a name that is loaded gets a new version, at all workers or at none, while
requests run on the old one.
"""

from flask import Blueprint, Response, request

from app.commands import Commands
from app.health import json_response
from app.schemas import LOAD_ADAPTER_BODY, UNLOAD_ADAPTER_BODY, decode_body
from app.service import Service, current_service
from titopool.commands import DropAdapter, GetStatus, LoadAdapter, SwitchAdapter, UnloadAdapter
from titopool.errors import InvalidRequest, ModelNotFound

blueprint = Blueprint("adapters", __name__)


@blueprint.post("/v1/load_lora_adapter/")
def load_adapter() -> Response:
    """Loads an adapter from a folder under a name, or a new version of one."""
    body = decode_body(request.get_data(), LOAD_ADAPTER_BODY)
    service = current_service()
    facts = service.link.facts
    if not facts.max_loras:
        raise InvalidRequest(
            "lora_name: expected a server with adapters; start it with --enable-lora",
            param="lora_name",
        )
    if body.lora_name == facts.model:
        raise InvalidRequest(
            f"lora_name: expected another name than the model's, got {body.lora_name!r}",
            param="lora_name",
        )
    commands: Commands = service.link.commands
    workers = commands.members()
    version = body.version
    if version is None:
        version = known_adapters(commands).get(body.lora_name, 0) + 1
    drop = DropAdapter(body.lora_name, version)
    load = LoadAdapter(body.lora_name, version, body.lora_path)
    commands.in_turn(workers, lambda index, first: load, undo=drop)
    switch = SwitchAdapter(body.lora_name, version)
    commands.in_turn(workers, lambda index, first: switch, undo=drop)
    return json_response({"lora_name": body.lora_name, "version": version})


@blueprint.post("/v1/unload_lora_adapter/")
def unload_adapter() -> Response:
    """Takes an adapter away; requests that run on it end with it."""
    body = decode_body(request.get_data(), UNLOAD_ADAPTER_BODY)
    commands: Commands = current_service().link.commands
    first, *_ = commands.in_turn(
        commands.members(), lambda index, first: UnloadAdapter(body.lora_name)
    )
    return json_response({"lora_name": body.lora_name, "version": first["version"]})


def known_adapters(commands: Commands) -> dict[str, int]:
    """Adapters by name, and their versions, that all workers have now."""
    statuses = commands.at_once(commands.members(), GetStatus())
    first, *others = (dict(one["adapters"]) for one in statuses)
    return {name: one for name, one in first.items() if all(o.get(name) == one for o in others)}


def adapter_named(service: Service, name: str | None, param: str = "model") -> str:
    """The adapter that a request means by `name`; "" for the model itself.

    Raises:
        ModelNotFound: there is none of that name.
    """
    facts = service.link.facts
    if name is None or name == facts.model:
        return ""
    known = service.link.adapters
    if name not in known and facts.max_loras:
        # It may have been loaded through another front end a moment ago.
        known = known_adapters(service.link.commands)
    if name not in known:
        names = ", ".join([repr(facts.model), *map(repr, sorted(known))])
        raise ModelNotFound(f"{param}: expected {names}, got {name!r}", param=param)
    return name
