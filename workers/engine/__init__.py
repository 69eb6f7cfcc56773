"""vLLM as a worker uses it: requests, parameters, results, LoRA adapters.

Runs in: each worker process. Imports: `images`; `in_model`, for the class and the patch that vLLM loads.
"""
