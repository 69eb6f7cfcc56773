"""An entry for each handler, by its endpoint's name, in a module for each family of clients.

Runs in: each gunicorn process. Imports: `app.openapi.answers`, `app.schemas`. A key is a Flask
endpoint: the names of the blueprints and of the handler. `tests/openapi/test_document.py` fails
for a route without an entry.
"""

from app.openapi.operation import Operation
from app.openapi.operations import admin, generation, inference, openai, sglang, vllm_rl, weights

OPERATIONS: dict[str, Operation] = {
    name: one
    for family in (generation, openai, inference, sglang, weights, vllm_rl, admin)
    for name, one in family.OPERATIONS.items()
}
# In the order in which the page shows them.
TAGS = {
    generation.TAG: "Token ids in, token ids out, as TRL's client calls it; scores and tokenization.",
    openai.TAG: "OpenAI's routes with vLLM's extensions.",
    inference.TAG: "vLLM's native routes for token ids, and render, which makes their bodies.",
    sglang.TAG: "SGLang's native routes. Its `/generate` is the one of the first family.",
    weights.TAG: "Updates of weights, pauses and adapters. They need an administrator's key.",
    vllm_rl.TAG: "vLLM's routes for weights and caches. They need an administrator's key.",
    admin.TAG: "Probes, metrics and workers.",
}
