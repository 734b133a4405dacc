"""What a discarded mass does to outputs: the envelope, one attention row, and, under assumptions, the logits.

Section 5 (envelope) and section 8 (outputs), as corrected (corrections 2, 6 and 10). The first two are theorems about
given numbers. The last needs assumptions that attention at one shallow layer cannot show: two prompts may attend
alike there and answer differently (Prop. 6.1; ``tests/rule/test_stability.py`` builds such a pair).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Floats = NDArray[np.float64]


def envelope(pooled_discarded: float, *, rows: int, query_heads: int, zeta: float) -> float:
    """Most that any head of any proposal row can discard, from the pooled mass alone (section 5).

    ``min(1, H_Q * W_p * q(D) / zeta)``. Attained where a single row of a single head, at the weight floor in a group
    that has another, eligible head, discards all that was pooled; or where ``zeta`` is 1 (correction 6).

    Args:
        pooled_discarded: pooled discarded mass [q(D)].
        rows: proposal rows really used [W_p].
        query_heads: query heads [H_Q].
        zeta: floor of the head weights, in (0, 1].

    Raises:
        ValueError: a count below one, ``zeta`` outside (0, 1], or a negative mass.
    """
    if rows < 1 or query_heads < 1 or not 0.0 < zeta <= 1.0 or not pooled_discarded >= 0.0:
        raise ValueError(
            f"an envelope needs rows >= 1, query_heads >= 1, zeta in (0, 1] and a mass >= 0, got {rows}, "
            f"{query_heads}, {zeta} and {pooled_discarded}"
        )
    return min(1.0, query_heads * rows * pooled_discarded / zeta)


def envelope_per_head(pooled_discarded: float, *, rows: int, groups: int, weights: ArrayLike) -> Floats:
    """The sharp form of :func:`envelope`, ``min(1, G * W_p * q(D) / w[h])`` per head (correction 6).

    Args:
        pooled_discarded: pooled discarded mass [q(D)].
        rows: proposal rows really used [W_p].
        groups: GQA groups [G].
        weights: head weights [w], positive, ``[H_Q]``, summing to one within a group.

    Returns:
        ``[H_Q]``.

    Raises:
        ValueError: a count below one, a weight that is not positive, or a negative mass.
    """
    floors = np.asarray(weights, dtype=np.float64)
    if rows < 1 or groups < 1 or not pooled_discarded >= 0.0 or not (floors > 0.0).all():
        raise ValueError(
            f"an envelope needs rows >= 1, groups >= 1, weights > 0 and a mass >= 0, got {rows}, {groups}, {floors} "
            f"and {pooled_discarded}"
        )
    return np.asarray(np.minimum(1.0, groups * rows * pooled_discarded / floors))


def fixed_row_bound(eta: ArrayLike, value_norm: ArrayLike) -> Floats:
    """How far one attention row's output can move: ``||o - o_R|| <= 2 V eta`` (section 8).

    For the same query, keys and values, with the weights renormalised on the retained keys. The factor 2 is attained
    by two keys with opposite values. Says nothing of later layers.

    Args:
        eta: the row's discarded mass, any shape ``[...]``.
        value_norm: largest norm of a value vector [V], broadcastable to ``eta``.
    """
    return np.asarray(2.0 * np.asarray(value_norm, dtype=np.float64) * np.asarray(eta, dtype=np.float64))


def value_diameter(retained: Tensor, removed: Tensor) -> float:
    """Largest distance between a retained and a removed value vector.

    ``eta`` times it bounds the row's change, because ``o - o_R = eta * (mean removed value - mean retained value)``:
    never more than :func:`fixed_row_bound` (correction 10).

    Args:
        retained: values of retained keys, ``[s, d]``.
        removed: values of removed keys, ``[t, d]``; none removed gives 0.
    """
    if not len(retained) or not len(removed):
        return 0.0
    # The default mode subtracts squares, which loses every digit between near neighbours far from the origin.
    mode = "donot_use_mm_for_euclid_dist"
    return float(torch.cdist(retained.double(), removed.double(), compute_mode=mode).max())


def local_head_lipschitz(
    *, unembedding_norm: float, gamma_max: float, rho: float, hidden: int, norm_eps: float
) -> float:
    """Constant ``C`` from the l2 norm before the final RMSNorm to the largest change of a logit (correction 2).

    ``unembedding_norm * max|gamma| / sqrt(rho^2 / d + eps)`` for states of norm at least ``rho`` in both runs. It
    holds although such states do not form a convex set: with ``s(r) = sqrt(r^2 / d + eps)`` and ``g(r) = r / s(r)``,
    ``(g - g')^2 + g g' |u - u'|^2 <= ((r - r')^2 + r r' |u - u'|^2) / s(rho)^2`` for directions ``u, u'``.

    Args:
        unembedding_norm: largest l2 norm of a row of the unembedding matrix.
        gamma_max: largest absolute weight of the final norm (of ``1 + weight`` where the model adds one).
        rho: smallest norm of the last state, over both runs.
        hidden: size of the state [d].
        norm_eps: epsilon of the norm.

    Raises:
        ValueError: a negative number, or ``rho`` and ``norm_eps`` both zero.
    """
    scale = rho**2 / hidden + norm_eps
    if min(unembedding_norm, gamma_max, rho, norm_eps) < 0.0 or not scale > 0.0:
        raise ValueError(
            "a head constant needs norms >= 0 and rho or norm_eps above 0, got "
            f"unembedding_norm={unembedding_norm}, gamma_max={gamma_max}, rho={rho}, norm_eps={norm_eps}"
        )
    return unembedding_norm * gamma_max / math.sqrt(scale)


def trivial_logit_cap(*, unembedding_norm: float, gamma_max: float, hidden: int) -> float:
    """Most that any logit can change whatever happens below: a normalised state has norm at most ``sqrt(d)``."""
    return 2.0 * unembedding_norm * gamma_max * math.sqrt(hidden)


@dataclass(frozen=True)
class Assumptions:
    """What must be assumed of the ``T`` layers above the audited one (section 8, correction 2).

    Distances are largest over the retained tokens, in l2. Measured numbers are estimates, not guarantees.

    Attributes:
        lipschitz: (L) ``Lambda_j [T]``: how much layer ``j``, attending to retained keys only, stretches the distance
            between the full run's retained states and the pruned run's. The full layer's constant does not do.
        drift: (D) ``[T]``: in the full run every retained row of head ``h``, chunk, delimiter and generated rows
            included, discards at layer ``j`` at most ``eta[h] + drift[j]``. Absorbs rows that no audit looked at.
        value_norm: (V) ``V[j, h] [T, H]``: largest ``||W_O^h v||`` over all keys of the full run, removed ones too.
        token_map: (M) ``M_j [T]``: Lipschitz constant from the attention module's output to the layer's output:
            post-norms, residual multipliers and MLP. For a mixture of experts, only while routing is unchanged.
        logit_lipschitz: ``C``: of the final norm and unembedding, from l2 to the largest change of a logit.
        value_diameter: ``[T, H]``, optional: largest ``||W_O^h (v_s - v_t)||``, ``s`` retained and ``t`` removed; used
            in place of ``2 V`` where smaller.
        logit_cap: optional: most that a logit can change at all (:func:`trivial_logit_cap`).
    """

    lipschitz: Floats
    drift: Floats
    value_norm: Floats
    token_map: Floats
    logit_lipschitz: float
    value_diameter: Floats | None = None
    logit_cap: float | None = None


@dataclass(frozen=True)
class StabilityBound:
    """What follows from the assumptions, for the first token after the prompt.

    Attributes:
        eta: ``[T, H]`` bound on the discarded mass of any retained row, at most 1.
        beta: ``[T]`` distance that each layer adds, ``beta_j``.
        distance: ``[T]`` bound on the distance after each layer, ``E_j``.
        contribution: ``[T]`` part of the last distance that each layer's ``beta`` is amplified to; they sum to it.
        logit_bound: most that a logit changes; the smaller of ``C * E_{L-1}`` and the trivial cap.
        vacuous: the trivial cap is at most ``C * E_{L-1}``, or the bound is infinite: nothing was learnt.
        greedy_unchanged: whether the greedy token is proved the same; None where no margin was given.
    """

    eta: Floats
    beta: Floats
    distance: Floats
    contribution: Floats
    logit_bound: float
    vacuous: bool
    greedy_unchanged: bool | None


def conditional_bound(assumptions: Assumptions, eta: ArrayLike, *, margin: float | None = None) -> StabilityBound:
    """How far the pruned run can be from the full one, if the assumptions hold (section 8).

    ``E_l = 0``, ``E_j <= Lambda_j E_{j-1} + beta_j`` with ``beta_j = M_j sum_h min(2 V[j,h], diameter[j,h]) eta[j,h]``
    and ``eta[j,h] = min(1, eta[h] + drift_j)``.

    Args:
        assumptions: constants of the layers above the audited one, in order.
        eta: ``[H]`` bound on the discarded mass of every retained row at the audited layer. An audit bounds a mean
            over observers, not every row: it may stand here only with a drift that makes up for it.
        margin: top-1 minus top-2 logit, of the full or of the pruned run.

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite, or negative ones (drift may be negative).
    """
    mass, diameter = np.asarray(eta, dtype=np.float64), assumptions.value_diameter
    stretch, drift, norms, through = (
        np.asarray(values, dtype=np.float64)
        for values in (assumptions.lipschitz, assumptions.drift, assumptions.value_norm, assumptions.token_map)
    )
    apart = 2.0 * norms if diameter is None else np.asarray(diameter, dtype=np.float64)
    if stretch.ndim != 1 or not len(stretch) or {drift.shape, through.shape} != {stretch.shape}:
        raise ValueError(
            f"lipschitz, drift and token_map must have one number per layer, got shapes {stretch.shape}, "
            f"{drift.shape} and {through.shape}"
        )
    if mass.ndim != 1 or {norms.shape, apart.shape} != {(len(stretch), len(mass))}:
        raise ValueError(
            f"value norms and diameters must be [layers, heads], {len(stretch)} layers and eta's shape {mass.shape}, "
            f"got {norms.shape} and {apart.shape}"
        )
    spread = np.minimum(2.0 * norms, apart)
    nonnegative = np.concatenate([stretch, through, mass, spread.ravel(), [assumptions.logit_lipschitz]])
    if not (np.isfinite(nonnegative).all() and np.isfinite(drift).all() and (nonnegative >= 0.0).all()):
        raise ValueError("assumptions must be finite, and nonnegative but for the drift; check what measured them")

    discarded = np.clip(mass + drift[:, None], 0.0, 1.0)
    beta = through * (spread * discarded).sum(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        # Not a number only where an overflowed product met an exact zero.
        amplification = np.nan_to_num(np.append(np.cumprod(stretch[:0:-1])[::-1], 1.0), nan=0.0, posinf=np.inf)
        contribution = np.where(beta == 0.0, 0.0, beta * amplification)
        distance, last = np.empty_like(beta), 0.0
        for layer, added in enumerate(beta):
            last = float(added) + (float(stretch[layer]) * last if last else 0.0)
            distance[layer] = last
        reach = assumptions.logit_lipschitz * last if last else 0.0
    cap = math.inf if assumptions.logit_cap is None else assumptions.logit_cap
    bound = min(reach, cap)
    return StabilityBound(
        eta=discarded,
        beta=beta,
        distance=distance,
        contribution=contribution,
        logit_bound=bound,
        vacuous=reach >= cap,
        # Strict: at exactly half the margin two tokens may tie.
        greedy_unchanged=None if margin is None else bound < 0.5 * margin,
    )


def token_bound(stretch: ArrayLike, added: ArrayLike) -> Floats:
    """The recursion of :func:`conditional_bound` token by token (correction 2), far tighter where few tokens move.

    ``e_j[t] <= stretch[j, t] * max_{s <= t} e_{j-1}[s] + added[j, t]``: causal attention shows a token no later one.

    Args:
        stretch: ``[T, n']``, how much layer ``j`` at token ``t``, attending to retained keys only, stretches the
            largest distance among the retained tokens up to ``t``.
        added: ``[T, n']``, the distance that the layer adds at each token: ``M_j sum_h diameter[j, h] eta[j, h, t]``.

    Returns:
        ``[T, n']`` bounds on the distance of each retained token after each layer.

    Raises:
        ValueError: shapes that differ, or numbers that are negative or not finite.
    """
    by, plus = np.asarray(stretch, dtype=np.float64), np.asarray(added, dtype=np.float64)
    if by.shape != plus.shape or by.ndim != 2:
        raise ValueError(f"stretch and added must be [layers, tokens] of one shape, got {by.shape} and {plus.shape}")
    if not (np.isfinite(by).all() and np.isfinite(plus).all() and (by >= 0.0).all() and (plus >= 0.0).all()):
        raise ValueError("stretch and added must be finite and nonnegative; check what measured them")
    distance, last = np.empty_like(plus), np.zeros(plus.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):
        for layer in range(len(plus)):
            reach = np.maximum.accumulate(last) if len(last) else last
            last = np.where(reach > 0.0, by[layer] * reach, 0.0) + plus[layer]
            # Not a number only where an infinite distance met an exact zero.
            distance[layer] = last = np.nan_to_num(last, nan=0.0, posinf=np.inf)
    return distance
