"""The page at `/` for people who watch the server, and the routes that only it needs.

Runs in: each gunicorn process. Imports: `app.operators.metrics` for the figures, `app.call.service`,
`pool`, `http`. Its HTML, scripts and styles are in `static/`; they need no build step.
"""
