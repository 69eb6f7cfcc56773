"""The real application with one more route, which reports the resources that this process holds."""

import os

from flask import Flask, Response

from app import create_app as create_real_app
from app.call.service import Service
from app.http.responses import json_response
from app.operators.description import EXTENSION
from app.route.document import encoded


def create_app() -> Flask:
    app = create_real_app()
    service: Service = app.extensions["titopool"]
    # What is described are the routes of the product: the one below has no `Operation`.
    app.extensions[EXTENSION] = encoded(app)

    @app.get("/fuzz/held/")
    def resources() -> Response:
        link = service.link
        return json_response(
            {
                "pid": os.getpid(),
                "commands": link.commands.num_pending,
                "jobs": link._pool.num_open_jobs,
                "places": service._num_open,
            }
        )

    return app
