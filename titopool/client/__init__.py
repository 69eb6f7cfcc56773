"""The client of trainers and agents: requests, and weight updates.

Runs in: the client's process. Imports: `wire`, `errors`, `release`.
"""
