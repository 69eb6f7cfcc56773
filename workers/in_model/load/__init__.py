"""Ways to write tensors into a model that vLLM has compiled and captured.

Runs in: vLLM's processes that hold the model.
"""
