"""vLLM's routes for reinforcement learning, which TRL from 1.11 on and other trainers call.

Runs in: each gunicorn process. Requests and answers are those of vLLM 0.33
(`entrypoints/rl/online/api_router.py`), so that the pool looks like one server with the ranks of all
its engines. Errors have titopool's shape. All routes but those of `server_info` need the admin key
(`app/http/auth.py`).
"""

from flask import Blueprint

from app.vllm_rl import (
    aborts,
    caches,
    checksums,
    not_offered,
    server_info,
    versions,
    weight_transfer,
)

blueprint = Blueprint("vllm_rl", __name__)
for routes in (weight_transfer, versions, checksums, caches, aborts, not_offered):
    blueprint.register_blueprint(routes.blueprint)
BLUEPRINTS = (blueprint, server_info.blueprint)
