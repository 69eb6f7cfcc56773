"""Weight updates and pauses of one worker: their states, steps, deadlines and checks.

Runs in: each worker process, on its event loop. Imports: `engine`, `ledger`.
"""
