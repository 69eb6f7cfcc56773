"""Tries clients' grammars before an engine sees them.

Runs in: each worker process, and helpers that try them.
"""
