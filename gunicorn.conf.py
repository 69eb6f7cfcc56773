"""Read by gunicorn from the folder it starts in: makes `gunicorn 'app:create_app()'` a whole server."""

from app.gunicorn_hooks import *  # noqa: F403
