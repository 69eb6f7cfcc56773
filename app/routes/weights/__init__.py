"""Routes for whoever trains: weight updates, pauses, TRL's old protocol, LoRA adapters.

Runs in: each gunicorn process. Imports: `app.service`, `schemas`, `pool`, `http`.
"""
