"""Workers that help each other: they do not know each other, front ends know all.

Runs in: each gunicorn process, in greenlets that the link starts. Imports `app/pool`.
"""
