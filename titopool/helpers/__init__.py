"""Helper processes: work that may take too long, or end its process, apart from its owner.

Runs in: the owner, a fork of it, and the helpers, which are forks of that. Nothing here imports torch or
vLLM.
"""
