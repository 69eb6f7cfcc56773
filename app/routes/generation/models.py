"""`GET /v1/models`: what is served, as OpenAI's clients ask for it."""

import time

from flask import Blueprint, Response

from app.http.responses import json_response
from app.service import current_service

blueprint = Blueprint("models", __name__)
_started = int(time.time())


@blueprint.get("/v1/models/")
def models() -> Response:
    """The model and its LoRA adapters, with vLLM's `max_model_len` beside OpenAI's fields."""
    facts = current_service().link.facts
    model = {
        "id": facts.model,
        "object": "model",
        "created": _started,
        "owned_by": "titopool",
        "root": facts.model,
        "parent": None,
        "max_model_len": facts.max_model_len,
    }
    adapters = [
        {**model, "id": name, "root": name, "parent": facts.model, "version": version}
        for name, version in sorted(current_service().link.adapters.items())
    ]
    return json_response({"object": "list", "data": [model, *adapters]})
