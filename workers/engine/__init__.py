"""vLLM as a worker uses it: requests, parameters, results, LoRA adapters.

Runs in: each worker process. Imports: `images`, `in_model`, for the names of what vLLM loads.
"""
