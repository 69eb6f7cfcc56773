"""The workers as a front end sees them: sockets, commands, state, placement.

Runs in: each gunicorn process, in one greenlet. Imports: nothing of `app`.
"""
