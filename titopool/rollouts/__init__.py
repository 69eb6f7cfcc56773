"""Conversations as token ids, many of them at once, and batches for a trainer.

Runs in: the trainer's process. Imports: `conversations`, `client`.
"""
