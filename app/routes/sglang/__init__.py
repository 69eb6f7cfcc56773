"""SGLang's native routes, as AReaL and slime call them (SGLang 0.5.23).

Runs in: each gunicorn process. Imports: `app.routes.vllm_rl`, `app.routes.weights`, `app.streams`,
`app.generation`, `outputs`, `inputs`, `schemas`. `POST /generate` is reached through
`app/routes/generation/generate.py`, as its path is TRL's too. The other routes need the admin key
(`app/http/auth.py`).
"""

from flask import Blueprint

from app.routes.sglang import control, updates

blueprint = Blueprint("sglang", __name__)
for routes in (control, updates):
    blueprint.register_blueprint(routes.blueprint)
