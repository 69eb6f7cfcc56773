"""Seconds of a weight update: titopool, vLLM's own server, TRL's clients and a bare broadcast.

Runs in: a process of its own, which is the trainer.
"""
