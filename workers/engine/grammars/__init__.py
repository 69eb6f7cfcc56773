"""Tries clients' grammars before an engine sees them.

Runs in: each worker process, and a child of it that tries them.
"""
