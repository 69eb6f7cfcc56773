"""OpenAI's routes with vLLM's extensions: completions, chat completions, models.

Runs in: each gunicorn process. Imports: `app.generation`, `outputs`, `inputs`, `schemas`, `http`.
"""
