"""Routes for operators of the server: health and metrics.

Runs in: each gunicorn process. Imports: `app.service`, `pool`, `http`.
"""
