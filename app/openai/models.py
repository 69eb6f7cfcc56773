"""`GET /v1/models`: the served models, as OpenAI's clients list them."""

import time

from flask import Blueprint
from msgspec.structs import replace

from app.call.service import current_service
from app.route.operation import Operation
from titopool.answers.operators import Model, Models
from titopool.errors import NoReadyWorker

blueprint = Blueprint("models", __name__)
_started = int(time.time())


@blueprint.get("/v1/models/")
@Operation(
    summary="The model and its adapters, as OpenAI's clients list them.",
    errors=(NoReadyWorker,),
)
def models() -> Models:
    """The base model and its LoRA adapters; `root`, `parent` and `max_model_len` are vLLM's."""
    link = current_service().link
    facts = link.facts
    model = Model(
        id=facts.model,
        object="model",
        created=_started,
        owned_by="titopool",
        root=facts.model,
        parent=None,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
    )
    adapters = [
        replace(model, id=name, root=name, parent=facts.model, version=version)
        for name, version in sorted(link.adapters.items())
    ]
    return Models(object="list", data=[model, *adapters])
