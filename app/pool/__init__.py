"""One front end's view of the workers: sockets, commands, jobs in flight and routing.

Runs in: each gunicorn process, in one greenlet. Imports: nothing of `app`.
"""
