"""From results to the contents of responses.

Runs in: each gunicorn process.
"""
