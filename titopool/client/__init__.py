"""What a trainer imports.

Runs in: the trainer's process. Imports: `wire`.
"""
