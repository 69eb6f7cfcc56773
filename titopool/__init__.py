"""titopool: a token-in/token-out generation server for reinforcement-learning post-training.

This package is the ground floor that trainers import and that both sides of the
server (`app`, the HTTP front end; `workers`, the engine processes) share.
It imports neither of them, nor Flask, vLLM or torch at import time.
"""

__version__ = "0.1.0"
