"""OpenAI's routes with vLLM's extensions: completions, chat completions, models.

Runs in: each gunicorn process.
"""

from app.openai import models, render, routes

BLUEPRINTS = (models.blueprint, routes.blueprint, render.blueprint)
