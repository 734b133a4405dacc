"""Upper confidence bounds on a mean of losses in [0, 1], for many heads at once.

An audit looks at ``m`` independent observers and accepts a head when the bound says that its mean discarded mass is
at most ``eps`` (section 6). Each bound is one-sided and errs with probability at most ``level`` per statement.
Rounding never turns a failure into a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.betting import (
    STAKES,
    best_log_wealth,
    log_wealth_needed,
    log_wealth_path,
    upper_mean,
)
from entroprefill_rag.rule.concentration import (
    empirical_bernstein_upper,
    hoeffding_upper,
    kl_passes,
    kl_upper,
)

BoundName = Literal["hoeffding", "kl", "empirical_bernstein", "betting"]
BOUNDS: tuple[BoundName, ...] = get_args(BoundName)

_MASS_TOLERANCE = 1e-4
_CLOSE = 1e-12
_LARGEST_M = 2**40


@dataclass(frozen=True)
class Bounded:
    """What a bound says of each head.

    Attributes:
        eta_hat: mean loss, ``[H]``.
        upper: upper confidence bound on the mean, ``eta_hat`` to 1, ``[H]``; ``upper <= eps`` exactly where passed.
        passed: whether "the mean is at most ``eps``" is accepted, ``[H]``; never where ``eta_hat > eps``.
        log_wealth: largest log wealth over the draws, ``[H]``; betting only.
        variance: unbiased sample variance, ``[H]``; empirical Bernstein only.
    """

    eta_hat: NDArray[np.float64]
    upper: NDArray[np.float64]
    passed: NDArray[np.bool_]
    log_wealth: NDArray[np.float64] | None = None
    variance: NDArray[np.float64] | None = None


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
    values = masses_of(losses)
    m = values.shape[1]
    eta_hat = values.mean(axis=1)
    if bound == "betting":
        # Wealth once made stays made, so the losses that came after it may have a larger mean than what was shown: the
        # statement would hold at its level, and the record would read like a mistake.
        wealth = np.maximum(log_wealth_path(values, eps).max(axis=1), 0.0)
        passed = (wealth >= log_wealth_needed(level)) & (eta_hat <= eps)
        upper = np.maximum(upper_mean(values, level), eta_hat)
        return Bounded(eta_hat, _agree(upper, passed, eps), passed, wealth)
    if bound == "kl":
        passed = kl_passes(eta_hat, m, eps, level)
        return Bounded(eta_hat, _agree(kl_upper(eta_hat, m, level), passed, eps), passed)
    if bound == "hoeffding":
        upper = hoeffding_upper(eta_hat, m, level)
        return Bounded(eta_hat, upper, upper <= eps)
    if m < 2:
        raise ConfigError("empirical Bernstein needs at least 2 observers for a variance, got 1; raise m_a")
    variance = values.var(axis=1, ddof=1)
    upper = empirical_bernstein_upper(eta_hat, variance, m, level)
    return Bounded(eta_hat, upper, upper <= eps, variance=variance)


def exact_mean(losses: ArrayLike, weights: ArrayLike | None, eps: float) -> Bounded:
    """The mean over an enumerated support: nothing is estimated, nothing can err (section 6).

    Args:
        losses: discarded masses ``[H, m]`` in [0, 1], one per row of the support. Not a number counts as 1.
        weights: nonnegative weights ``[m]`` of the rows, None for uniform ones.
        eps: largest mean accepted.

    Returns:
        ``upper`` is the mean (on the right side of ``eps`` where they differ by rounding only).

    Raises:
        ConfigError: ``eps`` outside (0, 1).
        ValueError: losses that are not masses, or weights that do not fit them.
    """
    _check(eps)
    values = masses_of(losses)
    share = np.ones(values.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    if share.shape != values.shape[1:] or not np.isfinite(share).all() or (share < 0).any() or share.sum() <= 0:
        raise ValueError(f"weights must be {values.shape[1]} nonnegative numbers, not all zero, got {share}")
    eta_hat = np.minimum((values * share).sum(axis=1) / share.sum(), 1.0)
    passed = eta_hat <= eps
    for head in np.flatnonzero(np.abs(eta_hat - eps) <= _CLOSE):
        # Caps equal to eps_audit make equality an everyday case: there, floats are compared without rounding.
        excess = sum(Fraction(w) * (Fraction(x) - Fraction(eps)) for w, x in zip(share, values[head], strict=True))
        passed[head] = excess <= 0
    return Bounded(eta_hat, _agree(eta_hat, passed, eps), passed)


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
    variance: ArrayLike | None = None,
    leeway: float = 0.0,
) -> NDArray[np.bool_]:
    """Which heads pass, from the numbers of a record alone.

    Hoeffding and KL follow from ``eta_hat``, betting from it and ``log_wealth``, empirical Bernstein from it and
    ``variance``, an exact mean from itself. In a record without the variance ``upper`` is taken, if it is no smaller
    than a variance of zero would make it.

    A record's numbers are rounded. A recorded verdict follows from them when it is no better than the verdict at
    ``leeway=1e-8`` and no worse than the one at ``leeway=-1e-8``.

    Args:
        bound: a bound, or ``"exact"`` for an enumerated support.
        eps: largest mean accepted.
        level: confidence level per statement; None where exact.
        m: observers looked at.
        eta_hat: mean loss ``[H]``.
        upper: upper bound ``[H]``.
        log_wealth: largest log wealth ``[H]``, betting only.
        variance: unbiased sample variance ``[H]``, empirical Bernstein only.
        leeway: relative change of the numbers in favour of passing.

    Raises:
        ConfigError: unknown bound or numbers out of range.
        ValueError: a number that the bound needs is missing.
    """
    mean = np.asarray(eta_hat, dtype=np.float64) * (1.0 - leeway)
    if bound == "exact":
        _check(eps)
        return np.asarray(mean <= eps)
    if level is None:
        raise ValueError(f"a sampled audit with bound {bound!r} needs the level it was tested at")
    _check(eps, level, bound)
    if bound == "betting":
        if log_wealth is None:
            raise ValueError("a betting audit can only be checked from its log_wealth, which is missing")
        wealth = np.asarray(log_wealth, dtype=np.float64) * (1.0 + leeway)
        return np.asarray((wealth >= log_wealth_needed(level)) & (mean <= eps))
    if bound == "kl":
        return kl_passes(mean, m, eps, level)
    if bound == "hoeffding":
        return np.asarray(hoeffding_upper(mean, m, level) <= eps)
    if variance is not None:
        spread = np.asarray(variance, dtype=np.float64) * (1.0 - leeway)
        return np.asarray(empirical_bernstein_upper(mean, spread, m, level) * (1.0 - leeway) <= eps)
    claimed = np.asarray(upper, dtype=np.float64) * (1.0 - leeway)
    least = empirical_bernstein_upper(mean, np.zeros_like(mean), m, level)
    return np.asarray((claimed <= eps) & (claimed >= least - _MASS_TOLERANCE * eps))


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


def masses_of(losses: ArrayLike) -> NDArray[np.float64]:
    """Losses as float64 ``[H, m]`` clipped to [0, 1]; not a number counts as 1.

    Raises:
        ValueError: not ``[H, m]`` with ``m >= 1``, or outside [0, 1] by more than rounding.
    """
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
