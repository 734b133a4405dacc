"""Valid p-values for "the expected loss is alpha or more", and testing in a fixed order.

Losses lie in [0, 1] and are independent between requests. A p-value is valid when, the expected loss being at least
``alpha``, it falls to ``u`` or below with probability at most ``u``, for every ``u``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr
from scipy.stats import binom

Floats = NDArray[np.float64]


def hoeffding_bentkus(total: ArrayLike, n: int, alpha: float) -> Floats:
    """The smaller of two valid tails; valid itself (Bates et al. 2021; Angelopoulos et al. 2021).

    ``min(exp(-n KL(min(R, alpha), alpha)), e P(Bin(n, alpha) <= ceil(n R)))`` with ``R = total / n``: Hoeffding's bound
    in its relative-entropy form, and Bentkus's. Both bound the probability of a mean of ``R`` or less, at every
    ``R``, and so does their minimum: no union over the two is paid.

    Args:
        total: sum of the losses, ``n R``; any shape.
        n: requests.
        alpha: the expected loss to be refuted.
    """
    _check(n, alpha)
    sums = np.asarray(total, dtype=np.float64)
    mean = np.clip(sums / n, 0.0, alpha)
    tight = np.exp(-n * (rel_entr(mean, alpha) + rel_entr(1.0 - mean, 1.0 - alpha)))
    bentkus = math.e * binom.cdf(np.ceil(sums), n, alpha)
    return np.asarray(np.minimum(np.minimum(tight, bentkus), 1.0), dtype=np.float64)


def hoeffding(total: ArrayLike, n: int, alpha: float) -> Floats:
    """``exp(-2 n (alpha - R)^2)`` where ``R < alpha``, else 1: valid and plain, for comparison."""
    _check(n, alpha)
    gap = np.maximum(alpha - np.asarray(total, dtype=np.float64) / n, 0.0)
    return np.exp(-2.0 * n * gap**2)


def fixed_sequence(p_values: Sequence[float], delta: float) -> int:
    """How many configurations are certified: those before the first whose p-value exceeds ``delta``.

    Each is tested at the whole of ``delta``. An error needs the first configuration in the order whose expected loss is
    not below alpha to be rejected, and that happens with probability at most ``delta``, however the p-values depend on
    each other. The order must not come from the losses that are tested.
    """
    return next((at for at, p in enumerate(p_values) if not p <= delta), len(p_values))


def smallest_n(alpha: float, delta: float) -> int:
    """Fewest requests with which anything can be certified: without any loss the p-value is ``(1 - alpha)^n``."""
    _check(1, alpha)
    n = max(1, math.ceil(math.log(delta) / math.log1p(-alpha)) - 1)
    while float(hoeffding_bentkus(0.0, n, alpha)) > delta:
        n += 1
    return n


def smallest_alpha(n: int, delta: float) -> float:
    """The level below which ``n`` requests can certify nothing, whatever they show: ``1 - delta^(1/n)``."""
    return -math.expm1(math.log(delta) / n)


def _check(n: int, alpha: float) -> None:
    if n < 1 or not 0.0 < alpha < 1.0:
        raise ValueError(f"a p-value needs at least one loss and alpha between 0 and 1, got n={n}, alpha={alpha}")
