"""Starts workers, one for each GPU, and starts them again.

Runs in: the supervisor's process; a worker imports `phase_pipe`. Imports: nothing of `workers` but `ledger`, `environment` and `process`.
"""
