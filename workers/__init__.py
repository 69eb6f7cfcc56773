"""One process for each engine, and their supervisor. Talks ZeroMQ with the front ends.

vLLM and torch are imported only by `engine` (inside functions) and `extension`.
"""
