"""Runs the workers as actors of a Ray cluster, in place of the supervisor's processes on this host.

Runs in: a child of gunicorn's master, and Ray's processes of the actors. Imports: of `workers` only
`supervisor`.
"""
