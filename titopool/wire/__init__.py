"""Messages between processes, the state that they share, and the sockets between them.

Runs in: all processes, also the trainer's. Imports: `errors`.
"""
