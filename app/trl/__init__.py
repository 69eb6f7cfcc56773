"""Routes that sample and score, as TRL's client calls them.

Runs in: each gunicorn process. Its routes for weights are in `app/weights/`.
"""

from app.trl import chat, mismatch, sequence_logprobs

BLUEPRINTS = tuple(routes.blueprint for routes in (chat, mismatch, sequence_logprobs))
