"""Weights from another worker: one gives the bytes of its model, another one writes them.

Runs in: vLLM's processes that hold the model. Imports `titopool` and `workers/in_model`.
"""
