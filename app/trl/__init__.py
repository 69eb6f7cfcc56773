"""Routes that sample and score, as TRL's client calls them.

Runs in: each gunicorn process. Its routes for weights are in `app/weights/`.
"""

from app.trl import mismatch, routes, sequence_logprobs

BLUEPRINTS = tuple(one.blueprint for one in (routes, mismatch, sequence_logprobs))
