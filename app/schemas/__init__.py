"""The shapes of bodies, and what is said of those that do not fit.

Runs in: each gunicorn process. Imports: nothing of `app`.
"""
