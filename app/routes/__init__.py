"""What clients ask: Flask blueprints, a package for each kind of client.

Runs in: each gunicorn process. Imports: all of `app` below it.
"""
