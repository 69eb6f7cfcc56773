"""`GET /v1/models`: the served models, as OpenAI's clients list them."""

import time

from flask import Blueprint, Response

from app.call.service import current_service
from app.http.responses import json_response
from app.openai.answers import Models
from app.route.operation import Operation
from titopool.errors import NoReadyWorker

blueprint = Blueprint("models", __name__)
_started = int(time.time())


@blueprint.get("/v1/models/")
@Operation(
    summary="The model and its adapters, as OpenAI's clients list them.",
    answer=Models,
    errors=(NoReadyWorker,),
)
def models() -> Response:
    """The base model and its LoRA adapters; `root`, `parent` and `max_model_len` are vLLM's."""
    link = current_service().link
    facts = link.facts
    model = {
        "id": facts.model,
        "object": "model",
        "created": _started,
        "owned_by": "titopool",
        "root": facts.model,
        "parent": None,
        "max_model_len": facts.max_model_len,
        "vocab_size": facts.vocab_size,
    }
    adapters = [
        {**model, "id": name, "root": name, "parent": facts.model, "version": version}
        for name, version in sorted(link.adapters.items())
    ]
    return json_response({"object": "list", "data": [model, *adapters]})
