"""titopool: a token-in/token-out generation server for reinforcement-learning post-training.

Trainers import this package, and both sides of the server share it: `app` (the HTTP front end) and
`workers` (one process for each engine). It imports neither side, nor Flask, vLLM or torch, at the
top of a module.
"""

__version__ = "0.1.0"
