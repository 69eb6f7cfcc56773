"""From bodies to checked token ids and images.

Runs in: each gunicorn process; the tokenizer has a thread. Imports: `schemas`, `pool`.
"""
