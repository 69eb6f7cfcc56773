"""Routes for whoever samples: TRL's, OpenAI's, scoring, tokenizing.

Runs in: each gunicorn process. Imports: `app.generation`, `outputs`, `inputs`, `schemas`, `http`.
"""
