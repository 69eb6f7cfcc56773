"""From results to the bytes of answers.

Runs in: each gunicorn process. Imports: `inputs`, for the tokenizer.
"""
