"""One generating request: it is admitted, its jobs run, its results come back or stream.

Runs in: each gunicorn process.
"""
