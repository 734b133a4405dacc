"""Chunk scores, low = remove first: ``S_i = ln(l_i) + lam * kappa_i`` (section 4), or evidence per expected share.

If ``l_i / l_j > e^lam`` then ``S_i > S_j``: concentration alone never overturns a larger ratio of relative masses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def relative_masses(pooled: Floats, tokens: NDArray[np.int64], alpha: float) -> Floats:
    """Smoothed mass of a chunk against what its length lets expect: ``l_i``; 1 is "as expected".

    ``l_i = ((A_i + alpha * pi_i) / (sum_j A_j + alpha)) / pi_i`` with ``pi_i`` the chunk's share of all chunk tokens.

    Args:
        pooled: ``[k]`` pooled chunk masses ``A``.
        tokens: ``[k]`` chunk lengths; a chunk of none has nothing to expect and gets 1.
        alpha: smoothing, > 0.

    Returns:
        ``[k]``, all > 0.
    """
    share = tokens / max(int(tokens.sum()), 1)
    filled = share > 0
    ratio = np.ones(len(share))
    np.divide(pooled + alpha * share, share * (pooled.sum() + alpha), out=ratio, where=filled)
    return ratio


def concentrations(token_mass: Floats, owner: NDArray[np.int64], chunks: int) -> Floats:
    """How unevenly a chunk's mass lies on its tokens: ``kappa_i = 1 - H2 / ln(n_i)`` in [0, 1].

    0 for an even spread, for a single token and for no mass at all; 1 for all mass on one token. Renormalised before
    squaring and accumulated in float64; rounding (-1e-16) is clamped.

    Args:
        token_mass: ``[T]`` pooled mass ``P`` of the chunk tokens.
        owner: ``[T]`` chunk of every token.
        chunks: ``k``.

    Returns:
        ``[k]``.
    """
    values = np.asarray(token_mass, dtype=np.float64)
    count = np.bincount(owner, minlength=chunks)
    mass = np.bincount(owner, weights=values, minlength=chunks)
    defined = (count > 1) & (mass > 0)
    share = values / np.where(mass > 0, mass, 1.0)[owner]
    collision = np.bincount(owner, weights=share * share, minlength=chunks)
    kappa = np.zeros(chunks)
    kappa[defined] = 1.0 + np.log(collision[defined]) / np.log(count[defined])
    return np.clip(kappa, 0.0, 1.0)


def chunk_scores(relative: Floats, kappa: Floats, lam: float) -> Floats:
    """``S_i = ln(l_i) + lam * kappa_i``, ``[k]``; low is removed first."""
    return np.asarray(np.log(relative) + lam * kappa)


def evidence_scores(evidence: Floats, tokens: NDArray[np.int64]) -> Floats:
    """``S_i = E_i / pi_i``: a chunk's evidence (:mod:`.evidence`) over its share of all chunk tokens, ``[k]``.

    Evidence may be negative, so there is no logarithm, and no smoothing; concentration was not seen to help it.

    Args:
        evidence: ``[k]``.
        tokens: ``[k]`` chunk lengths; a chunk of none gets 0.
    """
    share = tokens / max(int(tokens.sum()), 1)
    return np.divide(evidence, share, out=np.zeros(len(share)), where=share > 0)
