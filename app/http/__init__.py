"""What knows HTTP and no tokens: keys, errors, deadlines of connections.

Runs in: each gunicorn process. Imports: `pool`, for one constant of libev.
"""
