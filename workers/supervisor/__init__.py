"""Starts the workers, restarts them, and shows and stores what they log.

Runs in: the supervisor's process; `phase_pipe` also in each worker. Imports: of `workers` only
`ledger`.
"""
