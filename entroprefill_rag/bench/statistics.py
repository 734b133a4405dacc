"""Intervals over questions, and whether what a layer kept is better than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import hypergeom

from entroprefill_rag.calibration.ranking import interval

Floats = NDArray[np.float64]
LEAST_REQUESTS = 30
_SEED = 20240


@dataclass(frozen=True)
class Estimate:
    """A mean over questions with its 95% bootstrap interval, and how many there were."""

    mean: float
    low: float
    high: float
    n: int


def estimate(values: ArrayLike) -> Estimate | None:
    """Mean and interval; None where there is no value."""
    given = np.asarray(values, dtype=np.float64)
    if not given.size:
        return None
    return Estimate(*interval(given, np.random.default_rng(_SEED), draws=2000), n=len(given))


def ratio(above: ArrayLike, below: ArrayLike) -> Estimate | None:
    """Geometric mean of paired ratios, and its interval."""
    logs = np.log(np.asarray(above, dtype=np.float64)) - np.log(np.asarray(below, dtype=np.float64))
    found = estimate(logs)
    if found is None:
        return None
    mean, low, high = (float(np.exp(value)) for value in (found.mean, found.low, found.high))
    return Estimate(mean, low, high, found.n)


@dataclass(frozen=True)
class Removed:
    """One accepted removal: of ``chunks`` with ``gold`` gold ones, ``kept`` stayed, ``gold_kept`` gold ones."""

    chunks: int
    gold: int
    kept: int
    gold_kept: int


@dataclass(frozen=True)
class Chance:
    """Gold chunks kept by accepted removals, against random choices of as many chunks each.

    Attributes:
        requests: how many removals.
        kept: gold chunks that stayed, of ``gold``.
        expected: what a random choice would keep.
        p: probability that it keeps as many or more; exact.
    """

    requests: int
    gold: int
    kept: int
    expected: float
    p: float


def against_chance(removals: Sequence[Removed]) -> Chance | None:
    """One-sided exact test: the sum of independent hypergeometric counts, one of each request.

    Questions without gold, or with nothing but gold, say nothing and are left out; None where none is left.
    """
    told = [one for one in removals if 0 < one.gold < one.chunks and one.kept < one.chunks]
    if not told:
        return None
    law: Floats = np.ones(1)
    for one in told:
        counts = np.arange(min(one.gold, one.kept) + 1)
        law = np.convolve(law, hypergeom.pmf(counts, one.chunks, one.gold, one.kept))
    kept = sum(one.gold_kept for one in told)
    return Chance(
        requests=len(told),
        gold=sum(one.gold for one in told),
        kept=kept,
        expected=sum(one.gold * one.kept / one.chunks for one in told),
        p=min(1.0, float(law[kept:].sum())),
    )
