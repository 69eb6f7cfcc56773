"""The server's description of itself as an OpenAPI 3.1 document.

Runs in: each gunicorn process. Imports: `app.http`, `app.schemas`. An `Operation` stands at each
handler, and decodes and encodes for it; `answers/` has the shapes of answers; `document` makes the
document of them and of the application's routes, once.
"""
