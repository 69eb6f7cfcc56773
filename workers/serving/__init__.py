"""Jobs and commands of one worker.

Runs in: each worker process, on its event loop. Imports: `weights`, `engine`.
"""
