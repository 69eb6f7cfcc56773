"""The page at `/` for people who watch the server, and the routes that only it needs.

Runs in: each gunicorn process. Its HTML, scripts and styles are in `static/`; they need no build step.
"""
