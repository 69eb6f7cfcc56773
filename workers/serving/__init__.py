"""A worker's socket, its jobs and its commands.

Runs in: each worker process, on its event loop. Imports: `weights`, `engine`, `process`, `ledger`.
"""
