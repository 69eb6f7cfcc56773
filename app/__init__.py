"""The HTTP front end: one Flask application in each gunicorn process.

HTTP comes in, futures go out: handlers check a request, hand its jobs to the link
(`app/pool/link.py`) and wait. Flask lives only in this package.
"""

from flask import Flask

from app.http import auth, errors, timeouts
from app.routes import weights
from app.routes.admin import health, metrics
from app.routes.generation import chat, generate, models, openai, sequence_logprobs, tokenize
from app.service import Service
from titopool.settings.config import ServerConfig, from_environment


def create_app(config: ServerConfig | None = None) -> Flask:
    """The WSGI application; opens nothing until its first request or `Service.start`.

    Args:
        config: the settings; by default those of the environment.

    Raises:
        ConfigError: a setting is unknown or impossible.
    """
    config = config or from_environment()
    app = Flask(__name__, static_folder=None)
    app.url_map.strict_slashes = False
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes
    app.extensions["titopool"] = Service(config)
    timeouts.init_app(app, config.client_timeout_s)
    auth.init_app(app, config.api_key, config.admin_key)
    errors.init_app(app)
    for routes in (
        health,
        metrics,
        models,
        generate,
        chat,
        openai,
        sequence_logprobs,
        tokenize,
        weights,
    ):
        app.register_blueprint(routes.blueprint)
    return app
