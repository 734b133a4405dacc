"""How many observers an audit takes: smallest ``m_a`` that passes, for given losses (section 6, correction 8).

The count depends on the losses, not only on their mean. Two kinds are told: **constant** (every observer loses
``eta_hat``) and **zero_one** (an observer loses all of its attention or nothing). For given mean and number, constant
losses have the least variance and give every stake of a bet the most wealth at the end, losses of 0 and 1 the largest
variance and the least wealth; all others lie between. Hoeffding's bound and KL know the mean only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.rule.bounds import BOUNDS, BoundName, bounded_mean, smallest_m

MOST = 2**17
ETA_HATS = (0.0, 0.01, 0.05, 0.1)
EPS_AUDITS = (0.05, 0.1, 0.2)
STATEMENTS = (9, 72, 256, 1024)
DELTA = 0.05
LOSSES = ("constant", "zero_one")
DRAWN_FROM_MEAN_ONLY = ("hoeffding", "kl")


def losses_of(kind: str, eta: float, m: int) -> NDArray[np.float64]:
    """Losses of ``m`` observers with mean ``eta``, ``[m]``.

    ``"constant"``: all the same. ``"zero_one"``: 0 and 1, with ``ceil(eta m)`` of 1 spread evenly.
    """
    if kind == "constant":
        return np.full(m, eta)
    places = np.arange(1, m + 1)
    return np.diff(np.ceil(eta * places - 1e-9), prepend=0.0)


@dataclass(frozen=True)
class Needed:
    """Smallest number of observers that passes.

    Attributes:
        bound: the bound.
        losses: the kind of losses.
        eta_hat: their mean.
        eps_audit: the limit.
        statements: ``J * H_Q``, which share ``delta``.
        m: the number; None where no number passes, or none up to :data:`MOST`.
    """

    bound: str
    losses: str
    eta_hat: float
    eps_audit: float
    statements: int
    m: int | None


def smallest_that_passes(bound: BoundName, kind: str, eta: float, eps: float, level: float) -> int | None:
    """Smallest ``m`` at which losses of a kind pass, as a number that stays passed from there on by bisection.

    Whole numbers of losses of 1 make the count of ``zero_one`` jump by a few: then it is exact to those.
    """
    if eta >= eps:
        return None

    def passes(m: int) -> bool:
        return bool(bounded_mean(losses_of(kind, eta, m)[None], eps, level, bound).passed[0])

    low = high = smallest_m(bound, eps, level)
    if passes(low):
        return low
    while not passes(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high


def observers_table(delta: float = DELTA) -> list[Needed]:
    """Every cell of the table of ``docs/observers.md``."""
    cells = []
    for bound in BOUNDS:
        for eta in ETA_HATS:
            for kind in LOSSES:
                if kind == "zero_one" and (bound in DRAWN_FROM_MEAN_ONLY or eta == 0.0):
                    continue
                for eps in EPS_AUDITS:
                    for count in STATEMENTS:
                        m = smallest_that_passes(bound, kind, eta, eps, delta / count)
                        cells.append(Needed(bound, kind, eta, eps, count, m))
    return cells
