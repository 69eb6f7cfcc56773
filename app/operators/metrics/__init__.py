"""What `GET /metrics` shows: of the pool, of all front ends and of the engines.

Runs in: each gunicorn process.
"""
