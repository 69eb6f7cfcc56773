"""Settings, sampling options, logs.

Runs in: all processes of a server. Imports: `wire`.
"""
