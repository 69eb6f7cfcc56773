"""Routes for trainers: weight updates, pauses, TRL's protocol, LoRA adapters.

Runs in: each gunicorn process. All routes of this package need the admin key (`app/http/auth.py`).
"""

from flask import Blueprint

from app.weights import lora, pauses, status, trl_weights, updates

blueprint = Blueprint("weights", __name__)
for routes in (updates, pauses, status, trl_weights, lora):
    blueprint.register_blueprint(routes.blueprint)
BLUEPRINTS = (blueprint,)
