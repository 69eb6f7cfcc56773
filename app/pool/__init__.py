"""One front end's view of the workers: sockets, commands, jobs in flight and routing.

Runs in: each gunicorn process, in the link's greenlet and in those of handlers that submit, cancel
or send commands. Imports: of `app` only `counts`.
"""
