"""Upper confidence bounds on a mean of losses in [0, 1], for many heads at once.

An audit looks at ``m`` independent observers and accepts a head when the bound says that its mean discarded mass is
at most ``eps`` (section 6). Each bound is one-sided and errs with probability at most ``level`` per statement.
Rounding is always against acceptance: no claim passes because a float was rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr
from scipy.stats import beta

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.betting import (
    STAKES,
    best_log_wealth,
    log_wealth_needed,
    log_wealth_path,
    upper_mean,
)

BoundName = Literal["hoeffding", "kl", "empirical_bernstein", "betting"]
BOUNDS: tuple[BoundName, ...] = get_args(BoundName)

_MASS_TOLERANCE = 1e-4
_UP = 1.0 + 1e-12
_LARGEST_M = 2**40


@dataclass(frozen=True)
class Bounded:
    """What a bound says of each head.

    Attributes:
        eta_hat: mean loss, ``[H]``.
        upper: upper confidence bound on the mean, at most 1, ``[H]``; ``upper <= eps`` exactly where passed.
        passed: whether "the mean is at most ``eps``" is accepted, ``[H]``.
        log_wealth: largest log wealth over the draws, ``[H]``; betting only.
    """

    eta_hat: NDArray[np.float64]
    upper: NDArray[np.float64]
    passed: NDArray[np.bool_]
    log_wealth: NDArray[np.float64] | None = None


def statements(union: str, layers: int, heads: int) -> int:
    """Number of statements that share delta; each is tested at ``level = delta / statements``.

    ``"layers_and_heads"`` is the paper's ``J * H_Q``: every printed bound holds at once. ``"layers"`` is ``J``:
    a layer is accepted only if every head passes, so a false acceptance needs the one false head to pass, whichever
    it is (intersection-union test, Berger 1982; correction 9). Printed per-head bounds are then pointwise.

    Args:
        union: what the union bound runs over.
        layers: layers that may be audited [J].
        heads: query heads [H_Q].

    Raises:
        ConfigError: an unknown union, or a count below one.
    """
    if layers < 1 or heads < 1:
        raise ConfigError(f"a union bound needs at least one layer and one head, got {layers} and {heads}")
    if union == "layers_and_heads":
        return layers * heads
    if union == "layers":
        return layers
    raise ConfigError(f"union {union!r} is unknown; use 'layers_and_heads' or 'layers'")


def bounded_mean(losses: ArrayLike, eps: float, level: float, bound: str) -> Bounded:
    """Bound each head's mean loss from independent draws.

    Args:
        losses: discarded masses ``[H, m]`` in [0, 1], in the order drawn. A loss that is not a number counts as 1.
        eps: largest mean accepted [eps_audit].
        level: probability that a head is accepted though its mean exceeds ``eps``.
        bound: ``"hoeffding"``, ``"kl"``, ``"empirical_bernstein"`` or ``"betting"``.

    Raises:
        ConfigError: unknown bound, ``eps`` or ``level`` outside (0, 1), empirical Bernstein with ``m < 2``.
        ValueError: losses that are not ``[H, m]`` with ``m >= 1``, or not masses.
    """
    _check(eps, level, bound)
    values = _masses(losses)
    m = values.shape[1]
    eta_hat = values.mean(axis=1)
    if bound == "betting":
        wealth = np.maximum(log_wealth_path(values, eps).max(axis=1), 0.0)
        passed = wealth >= log_wealth_needed(level)
        return Bounded(eta_hat, _agree(upper_mean(values, level), passed, eps), passed, wealth)
    if bound == "kl":
        passed = kl_passes(eta_hat, m, eps, level)
        return Bounded(eta_hat, _agree(kl_upper(eta_hat, m, level), passed, eps), passed)
    if bound == "hoeffding":
        upper = hoeffding_upper(eta_hat, m, level)
    else:
        if m < 2:
            raise ConfigError("empirical Bernstein needs at least 2 observers for a variance, got 1; raise m_a")
        upper = empirical_bernstein_upper(eta_hat, values.var(axis=1, ddof=1), m, level)
    return Bounded(eta_hat, upper, upper <= eps)


def exact_mean(losses: ArrayLike, weights: ArrayLike | None, eps: float) -> Bounded:
    """The mean over an enumerated support: nothing is estimated, nothing can err (section 6).

    Args:
        losses: discarded masses ``[H, m]`` in [0, 1], one per row of the support. Not a number counts as 1.
        weights: nonnegative weights ``[m]`` of the rows, None for uniform ones.
        eps: largest mean accepted.

    Returns:
        ``upper`` is the mean, rounded up by a part in 10^12.

    Raises:
        ConfigError: ``eps`` outside (0, 1).
        ValueError: losses that are not masses, or weights that do not fit them.
    """
    _check(eps)
    values = _masses(losses)
    if weights is None:
        eta_hat = values.mean(axis=1)
    else:
        share = np.asarray(weights, dtype=np.float64)
        if share.shape != values.shape[1:] or not np.isfinite(share).all() or (share < 0).any() or share.sum() <= 0:
            raise ValueError(f"weights must be {values.shape[1]} nonnegative numbers, not all zero, got {share}")
        eta_hat = np.minimum((values * share).sum(axis=1) / share.sum(), 1.0)
    upper = np.minimum(eta_hat * _UP, 1.0)
    return Bounded(eta_hat, upper, upper <= eps)


def hoeffding_upper(eta_hat: ArrayLike, m: int, level: float) -> NDArray[np.float64]:
    """``eta_hat + sqrt(ln(1 / level) / (2 m))``: Hoeffding 1963, theorem 1; the paper's ``b`` (section 6)."""
    margin = np.sqrt(log_wealth_needed(level) / (2.0 * m))
    return np.asarray(np.minimum((np.asarray(eta_hat, dtype=np.float64) + margin) * _UP, 1.0))


def kl_passes(eta_hat: ArrayLike, m: int, eps: float, level: float) -> NDArray[np.bool_]:
    """``eta_hat < eps`` and ``m kl(eta_hat, eps) >= ln(1 / level)``.

    Chernoff's bound for means of losses in [0, 1]: Hoeffding 1963, inequality 2.1, ``kl`` the relative entropy of two
    Bernoulli distributions. Never looser than Hoeffding's, by Pinsker's inequality.
    """
    mean = np.minimum(np.asarray(eta_hat, dtype=np.float64) * _UP, 1.0)
    return np.asarray((mean < eps) & (m * _kl(mean, eps) >= log_wealth_needed(level)))


def kl_upper(eta_hat: ArrayLike, m: int, level: float) -> NDArray[np.float64]:
    """Smallest ``q`` above ``eta_hat`` with ``m kl(eta_hat, q) >= ln(1 / level)`` (see :func:`kl_passes`)."""
    low = np.minimum(np.asarray(eta_hat, dtype=np.float64) * _UP, 1.0)
    mean, high, needed = low, np.ones_like(low), log_wealth_needed(level)
    for _ in range(52):
        middle = 0.5 * (low + high)
        refuted = m * _kl(mean, middle) >= needed
        low, high = np.where(refuted, low, middle), np.where(refuted, middle, high)
    return high


def empirical_bernstein_upper(eta_hat: ArrayLike, variance: ArrayLike, m: int, level: float) -> NDArray[np.float64]:
    """``eta_hat + sqrt(2 V L / m) + 7 L / (3 (m - 1))`` with ``L = ln(2 / level)``.

    Maurer and Pontil 2009, "Empirical Bernstein bounds and sample variance penalization", theorem 4, for losses
    (their ``1 - X``); ``V`` is the unbiased sample variance, ``m >= 2``.
    """
    log_term = log_wealth_needed(level / 2.0)
    spread = np.sqrt(2.0 * np.asarray(variance, dtype=np.float64) * log_term / m)
    upper = (np.asarray(eta_hat, dtype=np.float64) + spread + 7.0 * log_term / (3.0 * (m - 1))) * _UP
    return np.asarray(np.minimum(upper, 1.0))


def smallest_m(bound: str, eps: float, level: float) -> int:
    """Smallest number of observers with which a head could pass at all: with every loss zero.

    Args:
        bound: name of the bound.
        eps: largest mean accepted.
        level: confidence level spent per statement.

    Raises:
        ConfigError: unknown bound, ``eps`` or ``level`` outside (0, 1), or no number below 2^40 suffices.
    """
    _check(eps, level, bound)
    low, high = 0 if bound != "empirical_bernstein" else 1, 2
    while not _zeros_pass(bound, high, eps, level):
        low, high = high, 2 * high
        if high > _LARGEST_M:
            raise ConfigError(f"no feasible number of observers shows a mean below eps={eps}; raise eps_audit")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _zeros_pass(bound, middle, eps, level) else (middle, high)
    return high


def recheck(
    bound: str,
    *,
    eps: float,
    level: float | None,
    m: int,
    eta_hat: ArrayLike,
    upper: ArrayLike,
    log_wealth: ArrayLike | None = None,
) -> NDArray[np.bool_]:
    """Which heads pass, from the numbers of a record alone.

    Hoeffding and KL follow from ``eta_hat``, betting from ``log_wealth``, an exact mean from itself. The variance
    that empirical Bernstein used is not in a record: there, ``upper`` is taken, if it is as large as a variance of
    zero would make it.

    Args:
        bound: a bound, or ``"exact"`` for an enumerated support.
        eps: largest mean accepted.
        level: confidence level per statement; None where exact.
        m: observers looked at.
        eta_hat: mean loss ``[H]``.
        upper: upper bound ``[H]``.
        log_wealth: largest log wealth ``[H]``, betting only.

    Raises:
        ConfigError: unknown bound or numbers out of range.
        ValueError: a number that the bound needs is missing.
    """
    if bound == "exact":
        _check(eps)
        return np.asarray(np.asarray(eta_hat, dtype=np.float64) * _UP <= eps)
    if level is None:
        raise ValueError(f"a sampled audit with bound {bound!r} needs the level it was tested at")
    _check(eps, level, bound)
    if bound == "betting":
        if log_wealth is None:
            raise ValueError("a betting audit can only be checked from its log_wealth, which is missing")
        return np.asarray(np.asarray(log_wealth, dtype=np.float64) >= log_wealth_needed(level))
    if bound == "kl":
        return kl_passes(eta_hat, m, eps, level)
    if bound == "hoeffding":
        return np.asarray(hoeffding_upper(eta_hat, m, level) <= eps)
    claimed = np.asarray(upper, dtype=np.float64)
    least = empirical_bernstein_upper(eta_hat, np.zeros_like(claimed), m, level)
    return np.asarray((claimed <= eps) & (claimed >= least - 1e-9))


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


def _zeros_pass(bound: str, m: int, eps: float, level: float) -> bool:
    zero = np.zeros(1)
    if bound == "betting":
        return bool(best_log_wealth(np.zeros(len(STAKES)), m, eps) >= log_wealth_needed(level))
    if bound == "kl":
        return bool(kl_passes(zero, m, eps, level)[0])
    if bound == "hoeffding":
        return bool(hoeffding_upper(zero, m, level)[0] <= eps)
    return bool(empirical_bernstein_upper(zero, zero, m, level)[0] <= eps)


def _agree(upper: NDArray[np.float64], passed: NDArray[np.bool_], eps: float) -> NDArray[np.float64]:
    """Make ``upper <= eps`` exactly where passed: inversion stops at a resolution, the test at ``eps`` does not."""
    return np.where(passed, np.minimum(upper, eps), np.maximum(upper, np.nextafter(eps, 1.0)))


def _masses(losses: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(losses, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] < 1:
        raise ValueError(f"losses must be [heads, observers] with at least one observer, got shape {values.shape}")
    values = np.where(np.isnan(values), 1.0, values)
    if (values < -_MASS_TOLERANCE).any() or (values > 1.0 + _MASS_TOLERANCE).any():
        raise ValueError(
            f"losses are masses and lie in [0, 1], got values from {values.min():.6g} to {values.max():.6g}"
        )
    return np.clip(values, 0.0, 1.0)


def _check(eps: float, level: float | None = None, bound: str | None = None) -> None:
    if bound is not None and bound not in BOUNDS:
        raise ConfigError(f"bound {bound!r} is unknown; use one of {', '.join(BOUNDS)}")
    if not 0.0 < eps < 1.0:
        raise ConfigError(f"eps must lie in (0, 1), got {eps}")
    if level is not None and not 0.0 < level < 1.0:
        raise ConfigError(f"the confidence level must lie in (0, 1), got {level}")
