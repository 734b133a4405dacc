"""What the mean of a head's losses says of a bet's wealth, and of the bound that comes from it.

A record holds neither the losses nor their order. For given mean and number of losses, constant losses make the most
of every stake and losses of 0 and 1 the least, because the logarithm is concave. The truth lies between.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.rule.betting import STAKES, log_wealth_needed, mix, upper_mean

Floats = NDArray[np.float64]

_RESOLUTION = 2.0**-15
"""Of :func:`.betting.upper_mean`, on both sides."""


def _least(eta: Floats, m: int, eps: Floats) -> Floats:
    """``[H]`` log wealth after ``m`` losses of 0 and 1."""
    with np.errstate(divide="ignore"):
        gain = np.log(1.0 - STAKES + STAKES / (1.0 - eps[:, None]))
        ruin = np.log(1.0 - STAKES)
    share = eta[:, None]
    lost = np.where(share > 0, share * np.where(share > 0, ruin, 0.0), 0.0)
    return mix(m * ((1.0 - share) * gain + lost))


def wealth_range(eta_hat: Floats, m: int, eps: float) -> tuple[Floats, Floats]:
    """Least and largest "largest log wealth over the draws" that ``m`` losses of this mean can have, ``[H]`` each."""
    low = np.maximum(_least(eta_hat, m, np.full_like(eta_hat, eps)), 0.0)
    drawn = np.arange(1, m + 1, dtype=np.float64)
    # The first t losses sum at least to what the others cannot hold.
    mean = np.clip((m * eta_hat[:, None] - (m - drawn)) / drawn, 0.0, 1.0)
    with np.errstate(divide="ignore"):
        factor = np.log(1.0 - STAKES + STAKES * ((1.0 - mean) / (1.0 - eps))[..., None])
    return low, np.maximum(mix(drawn[:, None] * factor).max(axis=1), 0.0)


def upper_range(eta_hat: Floats, m: int, level: float) -> tuple[Floats, Floats]:
    """Least and largest upper bound on the mean that ``m`` losses of this mean can have, ``[H]`` each."""
    constant = upper_mean(np.repeat(eta_hat[:, None], m, axis=1), level)
    low, high = eta_hat.copy(), np.ones_like(eta_hat)
    for _ in range(30):
        middle = 0.5 * (low + high)
        with np.errstate(divide="ignore"):
            refuted = _least(eta_hat, m, np.minimum(middle, 1.0 - 1e-12)) >= log_wealth_needed(level)
        low, high = np.where(refuted, low, middle), np.where(refuted, middle, high)
    return np.maximum(constant - _RESOLUTION, 0.0), np.minimum(high + _RESOLUTION, 1.0)
