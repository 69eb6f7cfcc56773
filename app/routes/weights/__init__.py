"""Routes for trainers: weight updates, pauses, TRL's protocol, LoRA adapters.

Runs in: each gunicorn process. Imports: `app.service`, `schemas`, `pool`, `http`. All routes of this
package need the admin key (`app/http/auth.py`).
"""

from flask import Blueprint

from app.routes.weights import lora, pauses, status, trl_weights, updates

blueprint = Blueprint("weights", __name__)
for routes in (updates, pauses, status, trl_weights, lora):
    blueprint.register_blueprint(routes.blueprint)
