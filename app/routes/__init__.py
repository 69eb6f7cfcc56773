"""The HTTP routes: Flask blueprints, one package for each kind of client.

Runs in: each gunicorn process. Imports: all of `app` below it.
"""
