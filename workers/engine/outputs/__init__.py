"""What vLLM has made of a job, as completions and chunks for front ends.

Runs in: each worker process, on its event loop.
"""
