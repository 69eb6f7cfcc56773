"""Anthropic's Messages, for agents that speak this dialect.

Follows the API's reference and the anthropic package. Runs in: each gunicorn process.
"""

from app.anthropic import routes

BLUEPRINTS = (routes.blueprint,)
