"""A conversation as token ids: how a chat template reads messages, what it writes after a sampled turn, and
what the turn says.

Runs in: the trainer's process; the server's chats use `chat_template`. Imports: `client`, no HTTP.
"""
