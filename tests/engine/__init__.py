"""Servers with real vLLM on tiny models."""
