"""From image files to what vLLM takes.

Runs in: each worker process, in threads of its own. Imports: nothing of `workers`.
"""
