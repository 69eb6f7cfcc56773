"""What is in flight in a front end, and its traces.

Runs in: each gunicorn process. Imports Flask, `app/pool/` and what is below it.
"""
