"""Weight updates and pauses of one worker: what follows what.

Runs in: each worker process, on its event loop. Imports: `engine`.
"""
