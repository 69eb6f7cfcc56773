"""Weights on their way from the trainer: the group, the thread that receives, and the memory.

Runs in: vLLM's processes that hold the model. Imports `titopool` and `workers/in_model`.
"""
