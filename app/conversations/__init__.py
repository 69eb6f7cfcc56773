"""Sessions: conversations that the server remembers as token ids.

Runs in: each gunicorn process.
"""
