"""Converts image files to vLLM's inputs.

Runs in: each worker process, in threads. Imports: `vllm_internals`.
"""
