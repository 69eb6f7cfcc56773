"""From results to the contents of responses.

Runs in: each gunicorn process. Imports: `inputs`, for the tokenizer.
"""
