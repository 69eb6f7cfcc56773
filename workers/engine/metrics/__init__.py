"""vLLM's own metrics, measured in the worker's process and written for front ends.

Runs in: each worker process, on its event loop.
"""
