"""What vLLM is started with.

Runs in: each worker process, before the engine exists.
"""
