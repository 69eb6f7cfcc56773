"""Tiny models, and what transformers says of them."""
