"""Statistics of the gap between the sampler's and the trainer's log-probabilities.

An inference engine and a trainer compute the same tokens with other kernels, so policy gradients are
slightly off-policy even with the same weights (Yao et al. 2025, "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training"). All differences are trainer minus sampler, in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# Limits of the groups by the sampler's probability of a token, above 0.
PROBABILITIES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 1.0)
# exp of more than 709 is infinite in float64; sums of many tokens are finite too.
MAX_EXPONENT = 600.0
# Less is a mask's value, such as the least float32, and would drown all other differences.
MIN_LOGPROB = -10_000.0


@dataclass(frozen=True)
class Group:
    """Tokens with a position or a probability from `low` to `high`."""

    low: float
    high: float
    num_tokens: int
    # Of |trainer - sampler|.
    mean_difference: float
    max_difference: float
    kl: float


@dataclass(frozen=True)
class Mismatch:
    """The gap of some completions."""

    num_completions: int
    num_tokens: int
    # Of |trainer - sampler|.
    mean_difference: float
    max_difference: float
    # KL(sampler || trainer) a token, estimated from the sampled tokens alone: k3 = r - 1 - log r with
    # r = trainer / sampler, which is never negative; k1 = -log r (Schulman 2020, "Approximating KL
    # Divergence").
    kl: float
    kl_k1: float
    # Of the importance weights trainer / sampler of single tokens, and of their squares.
    mean_weight: float
    mean_squared_weight: float
    # Effective sample size of importance weights as a share of the samples, (sum w)² / (n sum w²):
    # with a weight for each token, and with the product of its tokens' weights for each completion.
    token_ess: float
    completion_ess: float
    # From `low` up to, not including, `high`.
    by_position: tuple[Group, ...]
    # From above `low` up to `high`.
    by_probability: tuple[Group, ...]


def compare(
    sampler: Sequence[np.ndarray], trainer: Sequence[np.ndarray | Sequence[float]]
) -> Mismatch:
    """The statistics of completions with at least one token in all.

    Args:
        sampler, trainer: log-probabilities of the same tokens, one array or list of shape [tokens]
            for each completion.

    Raises:
        ValueError: the lengths differ, a value is not finite, below `MIN_LOGPROB` or clearly above 0,
            or there is no token.
    """
    check_lengths(sampler, trainer)
    of_sampler = [np.asarray(one, np.float64) for one in sampler]
    of_trainer = [np.asarray(one, np.float64) for one in trainer]
    _check_values(of_trainer)
    pairs = zip(of_sampler, of_trainer, strict=True)
    differences = [theirs - ours for ours, theirs in pairs if len(ours)]
    totals = np.array([one.sum() for one in differences])
    logs = np.concatenate(differences)
    ours = np.concatenate(of_sampler)
    positions = np.concatenate([np.arange(len(one)) for one in sampler])
    # Half of the limit: squares are finite too.
    weights = np.exp(np.minimum(logs, MAX_EXPONENT / 2))
    return Mismatch(
        num_completions=len(sampler),
        num_tokens=len(ours),
        mean_difference=float(np.abs(logs).mean()),
        max_difference=float(np.abs(logs).max()),
        kl=float(k3(logs).mean()),
        kl_k1=float(-logs.mean()),
        mean_weight=float(weights.mean()),
        mean_squared_weight=float(np.square(weights).mean()),
        token_ess=effective_share(logs),
        completion_ess=effective_share(totals),
        by_position=_by_position(positions, logs),
        by_probability=_by_probability(np.exp(ours), logs),
    )


def check_lengths(
    sampler: Sequence[np.ndarray], trainer: Sequence[np.ndarray | Sequence[float]]
) -> None:
    """Raises ValueError where the two have other numbers of completions or tokens, or no token."""
    if len(sampler) != len(trainer):
        raise ValueError(f"expected {len(sampler)} completions, got {len(trainer)}")
    if not sum(map(len, sampler)):
        raise ValueError("expected at least one token, got none")
    for index, (ours, theirs) in enumerate(zip(sampler, trainer, strict=True)):
        if len(ours) != len(theirs):
            raise ValueError(
                f"completion {index}: expected {len(ours)} log-probabilities, got {len(theirs)}"
            )


def _check_values(trainer: Sequence[np.ndarray]) -> None:
    for index, values in enumerate(trainer):
        # A sum in bfloat16 may end above 0.
        wrong = np.flatnonzero(~np.isfinite(values) | (values > 0.1) | (values < MIN_LOGPROB))
        if len(wrong):
            raise ValueError(
                f"completion {index}, token {wrong[0]}: expected a finite log-probability from "
                f"{MIN_LOGPROB:g} to 0, got {values[wrong[0]]}; send values from before a mask"
            )


def k3(logs: np.ndarray) -> np.ndarray:
    """Schulman's estimator for each token; `logs`: trainer minus sampler."""
    values: np.ndarray = np.expm1(np.minimum(logs, MAX_EXPONENT)) - logs
    return values


def effective_share(logs: np.ndarray) -> float:
    """(sum w)² / (n sum w²) of weights with these logarithms, from 1 / n to 1."""
    weights = np.exp(logs - logs.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def _by_position(positions: np.ndarray, logs: np.ndarray) -> tuple[Group, ...]:
    limits = [0, 1]
    while limits[-1] <= positions.max():
        limits.append(2 * limits[-1])
    return tuple(
        _group(low, high, logs[(low <= positions) & (positions < high)])
        for low, high in pairwise(limits)
    )


def _by_probability(probabilities: np.ndarray, logs: np.ndarray) -> tuple[Group, ...]:
    groups = []
    for low, high in pairwise(PROBABILITIES):
        # The last group has what rounding puts above 1, the first what is too small for a float.
        is_in = (low < probabilities) | (low == 0)
        is_in &= (probabilities <= high) | (high == 1)
        if is_in.any():
            groups.append(_group(low, high, logs[is_in]))
    return tuple(groups)


def _group(low: float, high: float, logs: np.ndarray) -> Group:
    return Group(
        float(low), float(high), len(logs),
        float(np.abs(logs).mean()), float(np.abs(logs).max()), float(k3(logs).mean()),
    )  # fmt: skip
