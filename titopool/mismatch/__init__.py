"""How far a sampler's log-probabilities are from a trainer's, of the same tokens.

Runs in: each gunicorn process (`POST /mismatch`) and the command `titopool mismatch`.
"""
