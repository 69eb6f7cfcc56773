"""The answer of `POST /mismatch`."""

from dataclasses import fields

import msgspec

from titopool.mismatch.statistics import Mismatch

MismatchAnswer = msgspec.defstruct(
    "MismatchAnswer",
    [
        ("request_id", str),
        ("logprobs_mode", str),
        *((one.name, one.type) for one in fields(Mismatch)),
    ],
    namespace={"__doc__": "How far a trainer's log-probabilities are from the sampler's, in nats."},
    module=__name__,
    kw_only=True,
)
