"""Receives, checks and loads weights, and sends log-probabilities as numbers.

Runs in: vLLM's processes that hold the model. Imports: nothing of `workers`.
"""
