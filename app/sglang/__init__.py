"""SGLang's native routes, as AReaL and slime call them (SGLang 0.5.23).

Runs in: each gunicorn process. `POST /generate` is reached through `app/generate.py`, as its path is
TRL's too. The other routes need the admin key (`app/http/auth.py`).
"""

from flask import Blueprint

from app.sglang import control, disk

blueprint = Blueprint("sglang", __name__)
for routes in (control, disk):
    blueprint.register_blueprint(routes.blueprint)
BLUEPRINTS = (blueprint,)
