"""HTTP without tokens: keys, errors, connections, responses.

Runs in: each gunicorn process.
"""
