"""The trainer's client: weight updates.

Runs in: the trainer's process. Imports: `wire`.
"""
