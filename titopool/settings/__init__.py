"""Settings, sampling options and logging.

Runs in: all processes of a server. Imports: `wire`.
"""
