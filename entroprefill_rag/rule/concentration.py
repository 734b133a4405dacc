"""Concentration bounds in closed form: from a mean (and a variance) to an upper confidence bound.

Each is one-sided for the mean of ``m`` independent losses in [0, 1] and errs with probability at most ``level``. All
are vectorised over heads and rounded up: :data:`ROUND_UP` on the mean, :data:`.betting.ROUNDING` on the logarithm.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr
from scipy.stats import beta

from entroprefill_rag.rule.betting import log_wealth_needed

ROUND_UP = 1.0 + 1e-12
"""Factor on a mean of masses: far above the error of summing them, so that rounding cannot pass a head."""


def hoeffding_upper(eta_hat: ArrayLike, m: int, level: float) -> NDArray[np.float64]:
    """``eta_hat + sqrt(ln(1 / level) / (2 m))``: Hoeffding 1963, theorem 1; the paper's ``b`` (section 6)."""
    margin = np.sqrt(log_wealth_needed(level) / (2.0 * m))
    return np.asarray(np.minimum((np.asarray(eta_hat, dtype=np.float64) + margin) * ROUND_UP, 1.0))


def kl_passes(eta_hat: ArrayLike, m: int, eps: float, level: float) -> NDArray[np.bool_]:
    """``eta_hat < eps`` and ``m kl(eta_hat, eps) >= ln(1 / level)``.

    Chernoff's bound for means of losses in [0, 1]: Hoeffding 1963, inequality 2.1, ``kl`` the relative entropy of two
    Bernoulli distributions. Never looser than Hoeffding's, by Pinsker's inequality.
    """
    mean = np.minimum(np.asarray(eta_hat, dtype=np.float64) * ROUND_UP, 1.0)
    return np.asarray((mean < eps) & (m * _kl(mean, eps) >= log_wealth_needed(level)))


def kl_upper(eta_hat: ArrayLike, m: int, level: float) -> NDArray[np.float64]:
    """Smallest ``q`` above ``eta_hat`` with ``m kl(eta_hat, q) >= ln(1 / level)`` (see :func:`kl_passes`)."""
    low = np.minimum(np.asarray(eta_hat, dtype=np.float64) * ROUND_UP, 1.0)
    mean, high, needed = low, np.ones_like(low), log_wealth_needed(level)
    for _ in range(52):
        middle = 0.5 * (low + high)
        refuted = m * _kl(mean, middle) >= needed
        low, high = np.where(refuted, low, middle), np.where(refuted, middle, high)
    return np.asarray(high)


def empirical_bernstein_upper(eta_hat: ArrayLike, variance: ArrayLike, m: int, level: float) -> NDArray[np.float64]:
    """``eta_hat + sqrt(2 V L / m) + 7 L / (3 (m - 1))`` with ``L = ln(2 / level)``.

    Maurer and Pontil 2009, "Empirical Bernstein bounds and sample variance penalization", theorem 4, for losses
    (their ``1 - X``); ``V`` is the unbiased sample variance, ``m >= 2``.
    """
    log_term = log_wealth_needed(level / 2.0)
    spread = np.sqrt(2.0 * np.asarray(variance, dtype=np.float64) * log_term / m)
    upper = (np.asarray(eta_hat, dtype=np.float64) + spread + 7.0 * log_term / (3.0 * (m - 1))) * ROUND_UP
    return np.asarray(np.minimum(upper, 1.0))


def exceedance_upper(exceeded: int, m: int, level: float) -> float:
    """Upper bound on the share of observers that lose more than a threshold at any head (correction 9).

    Clopper and Pearson 1934, one-sided: exact for ``exceeded`` of ``m`` independent observers.

    Args:
        exceeded: observers whose largest loss over the heads was above the threshold.
        m: observers looked at.
        level: probability that the share is larger than the bound.

    Raises:
        ValueError: not ``0 <= exceeded <= m`` with ``m >= 1``, or a level outside (0, 1).
    """
    if not (m >= 1 and 0 <= exceeded <= m and 0.0 < level < 1.0):
        raise ValueError(f"cannot bound {exceeded} of {m} observers at level {level}; need 0 <= exceeded <= m, m >= 1")
    return 1.0 if exceeded == m else float(beta.ppf(1.0 - level, exceeded + 1, m - exceeded))


def _kl(p: NDArray[np.float64], q: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(rel_entr(p, q) + rel_entr(1.0 - p, 1.0 - np.asarray(q)))
