"""What `WeightsClient` is made of: a trainer's tensors, their messages and the group that sends them.

Runs in: trainers. Imports: `wire`.
"""
