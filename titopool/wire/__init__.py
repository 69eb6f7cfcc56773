"""What processes tell one another, and the sockets that carry it.

Runs in: all processes, the trainer's too. Imports: nothing of `titopool` but errors.
"""
