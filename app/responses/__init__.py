"""OpenAI's Responses API, without state: items in, items out.

Runs in: each gunicorn process.
"""

from app.responses import routes

BLUEPRINTS = (routes.blueprint,)
