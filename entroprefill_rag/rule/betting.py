"""A bet against "the mean loss exceeds eps": the wealth that a fair bettor cannot make unless that is false.

Capital process of Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B 2024,
section 4), one-sided as in correction 8: from wealth 1, at every draw a predictable ``lambda_t`` in
``[0, 1 / (1 - eps)]`` is staked on a loss below ``eps``,

    E_t = prod_{i <= t} (1 - lambda_i (X_i - eps)).

If the mean is at least ``eps``, ``E`` is a nonnegative supermartingale, so by Ville's inequality it ever reaches
``1 / level`` with probability at most ``level``: at a fixed number of draws, or looked at after each of them.

**How it bets [ours].** A mixture over constant stakes, ``E_t = sum_b w_b prod_i (1 - b + b (1 - X_i) / (1 - eps))``,
that is ``lambda = b / (1 - eps)`` for the fractions ``b`` of :data:`STAKES` (Cover's universal portfolio with a
discrete prior). It equals the predictable bet that weighs each stake by its own wealth so far. Measured against
plug-in bets it has nearly the power of the best of them on attention masses, and four properties that they lack:
the last wealth does not depend on the order of the draws; wealth grows with ``eps`` for given losses, so that the
upper bound is one bisection; the best possible future of a head is known exactly; a loss of 1 never ruins it. Most
of the prior sits on ``b = 1`` because masses vary little: with constant losses no valid test beats that stake.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

STAKES = np.array([1.0, 0.9, 0.65, 0.35, 0.1])
"""Fractions ``b`` of the wealth at stake; ``lambda = b / (1 - eps)``."""

LOG_PRIOR = np.log([0.8, 0.1, 0.06, 0.03, 0.01])
"""Log of the wealth given to each stake at the start."""

ROUNDING = 1e-9
"""Log wealth asked for beyond ``ln(1 / level)``: far above any rounding, so that rounding cannot pass a head."""

_BISECTIONS = 16
# Factors lie below 2^17 in a bisection of 16 steps, so a product of 32 cannot overflow; 32 times fewer logarithms.
_BLOCK = 32


def log_wealth_needed(level: float) -> float:
    """Log wealth at which a statement is accepted: ``ln(1 / level)``, and a little for rounding."""
    return -math.log(level) + ROUNDING


def log_growth(losses: NDArray[np.float64], eps: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Log factor by which each stake's wealth changes at each loss.

    Args:
        losses: masses in [0, 1], any shape ``[...]``.
        eps: claimed means in [0, 1), broadcastable to ``losses``.

    Returns:
        ``[..., stakes]``; minus infinity where the stake is lost (a loss of 1 at full stake).
    """
    kept = ((1.0 - losses) / (1.0 - np.asarray(eps)))[..., None]
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(1.0 - STAKES + STAKES * kept))


def mix(log_stakes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log wealth of the mixture from each stake's own.

    Args:
        log_stakes: ``[..., stakes]``.

    Returns:
        ``[...]``; minus infinity only if every stake is lost, which losses in [0, 1] cannot do.
    """
    weighted = log_stakes + LOG_PRIOR
    best = weighted.max(axis=-1)
    with np.errstate(invalid="ignore"):
        total = best + np.log(np.exp(weighted - best[..., None]).sum(axis=-1))
    return np.asarray(np.where(np.isneginf(best), -np.inf, total))


def log_wealth_path(losses: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    """Log wealth after every draw.

    Args:
        losses: masses in [0, 1], ``[H, m]``, in the order drawn.
        eps: the claimed mean.

    Returns:
        ``[H, m]``.
    """
    return mix(np.cumsum(log_growth(losses, eps), axis=1))


def best_log_wealth(log_stakes: NDArray[np.float64], draws: int, eps: float) -> NDArray[np.float64]:
    """Log wealth if each of ``draws`` more losses were zero: no other losses give more.

    Args:
        log_stakes: each stake's log wealth so far, ``[..., stakes]``.
        draws: how many losses are still to come.
        eps: the claimed mean.

    Returns:
        ``[...]``.
    """
    return mix(log_stakes + draws * log_growth(np.zeros(()), eps))


def upper_mean(losses: NDArray[np.float64], level: float) -> NDArray[np.float64]:
    """Upper confidence bound on the mean: the smallest claim that the final wealth refutes being exceeded.

    Wealth grows with the claim, so the claims are bisected; the end that is certainly refuted is returned.

    Args:
        losses: masses in [0, 1], ``[H, m]``.
        level: probability that the bound is below the mean.

    Returns:
        ``[H]``, at most 1, up to ``2 ** -16`` above the exact inversion.
    """
    needed = log_wealth_needed(level)
    blocks = np.arange(0, losses.shape[1], _BLOCK)
    gains = 1.0 - losses
    low = losses.mean(axis=1)
    high = np.ones_like(low)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        with np.errstate(divide="ignore", invalid="ignore"):
            kept = gains / (1.0 - middle)[:, None]
            factors = (1.0 - STAKES)[:, None, None] + STAKES[:, None, None] * kept
            stakes = np.log(np.multiply.reduceat(factors, blocks, axis=2)).sum(axis=2)
            refuted = mix(stakes.T) >= needed
        low, high = np.where(refuted, low, middle), np.where(refuted, middle, high)
    return np.asarray(high)
