"""Tool calls and reasoning of chats: vLLM's parsers, in helper processes with a limit of CPU time.

Runs in: each worker process, and its helpers.
"""
