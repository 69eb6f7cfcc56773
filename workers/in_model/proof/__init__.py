"""Whether the tensors of an update fit a model and reach all of it, seen before anything changes.

Runs in: vLLM's processes that hold the model.
"""
