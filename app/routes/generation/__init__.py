"""Routes that sample, score and tokenize, as TRL's client and vLLM's server have them.

Runs in: each gunicorn process. Imports: `app.generation`, `outputs`, `inputs`, `schemas`, `http`.
"""
