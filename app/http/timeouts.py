"""Deadlines on a client's connection: gunicorn's own reads and writes have none."""

from flask import Flask, Response, request


def init_app(app: Flask, timeout_s: float) -> None:
    """Ends a connection whose client neither sends the rest of its request nor takes its answer."""

    @app.before_request
    def set_deadline() -> None:
        client = request.environ.get("gunicorn.socket")
        if client is not None:
            client.settimeout(timeout_s)

    @app.after_request
    def end_deadline(response: Response) -> Response:
        client = request.environ.get("gunicorn.socket")
        if client is not None:
            # Between two requests, gunicorn's `keepalive` counts.
            response.call_on_close(lambda: client.settimeout(None))
        return response
