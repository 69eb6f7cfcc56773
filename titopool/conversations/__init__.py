"""Conversations as token ids: how a chat template reads messages, what it writes after a sampled turn,
and what the model said in it. No HTTP, no Flask, no torch.
"""
