"""The bodies of HTTP requests and how they are decoded.

Runs in: each gunicorn process. Imports: nothing of `app`.
"""
