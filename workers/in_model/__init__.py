"""What touches the model: receives, checks and loads weights, and packs log-probabilities.

Runs in: vLLM's processes. Imports: nothing of `workers`.
"""
