"""A route: what its handler says of it, its body, its answer, and the OpenAPI 3.1 document of all.

Runs in: each gunicorn process. An `Operation` stands at each handler, and decodes and encodes for it;
`document` makes the document of them and of the application's routes, once.
"""
