"""Commands to the workers of a whole pool, which several protocols send.

Runs in: each gunicorn process.
"""
