"""The server's description of itself as an OpenAPI 3.1 document.

Runs in: each gunicorn process, once. Imports: `app.http`, `app.schemas`. `operations/` has an entry
for each handler, with the decoder of its body; `answers/` has the shapes of answers; `document`
makes the document of them and of the application's routes.
"""
