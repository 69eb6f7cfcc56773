"""gunicorn reads this file in its working folder: `gunicorn 'app:create_app()'` is a whole server."""

from app.gunicorn_hooks import *  # noqa: F403
