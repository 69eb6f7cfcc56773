"""Sessions of agents: made, read and ended; their turns come by `/sessions/{id}/v1/…`.

Runs in: each gunicorn process.
"""

from app.sessions import routes

BLUEPRINTS = (routes.blueprint,)
