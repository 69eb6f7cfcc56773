"""Turns request bodies into checked token ids and images.

Runs in: each gunicorn process; the tokenizer runs in a thread.
"""
