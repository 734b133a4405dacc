"""Pooling of heads (section 3, correction 6): which heads weigh more in the order of removal, never in a guarantee.

Heads of one GQA group are neighbours: query head ``h`` belongs to group ``h // r``, ``r = H_Q / G``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.config import HeadProfile
from entroprefill_rag.errors import ConfigError

Floats = NDArray[np.float64]
Weighting = Literal["renyi", "uniform", "profile", "callable"]
HeadWeights = Literal["auto", "renyi", "uniform", "profile"] | HeadProfile | Callable[..., Any]


@dataclass(frozen=True)
class Pooling:
    """Heads of one layer, weighed.

    Attributes:
        region_mass: ``[H_Q]`` mass ``s[h]`` of ``pbar`` on the region of interest.
        entropy: ``[H_Q]`` Renyi-2 entropy ``H2[h]`` in nats over that region, ``inf`` where it holds no mass.
        eligible: ``[H_Q]`` whether ``s[h] >= mu_min``.
        weights: ``[H_Q]`` ``w[h]``, at least ``zeta / r``, summing to 1 within a group; those of a profile sum to G
            over the layer instead.
        fallback_groups: groups without an eligible head.
        weighting: what weighed the heads: "renyi", "uniform", "profile" or "callable".
        picked: ``[H_Q]`` the heads that a profile picks at this layer; None without one.
    """

    region_mass: Floats
    entropy: Floats
    eligible: NDArray[np.bool_]
    weights: Floats
    fallback_groups: int
    weighting: Weighting = "renyi"
    picked: NDArray[np.bool_] | None = None

    @property
    def deciding_heads(self) -> int:
        """Eligible heads, of those that a profile picks where there is one."""
        return int((self.eligible if self.picked is None else self.eligible & self.picked).sum())

    @property
    def all_fall_back(self) -> bool:
        """Whether no head may decide the order."""
        return self.deciding_heads == 0


def renyi_entropy(mass: Floats) -> tuple[Floats, Floats]:
    """Mass and order-2 entropy of distributions that need not be normalised.

    Renormalised before squaring, in float64: the raw square of a small float32 probability is 0.

    Args:
        mass: ``[H, T]`` nonnegative.

    Returns:
        ``[H]`` total mass and ``[H]`` ``-ln sum_j phat[j]^2``, ``inf`` where the mass is 0.
    """
    values = np.asarray(mass, dtype=np.float64)
    total = values.sum(axis=-1)
    share = values / np.where(total > 0, total, 1.0)[..., None]
    collision = np.square(share).sum(axis=-1)
    entropy = np.full_like(total, np.inf)
    np.log(collision, out=entropy, where=total > 0)
    return total, np.where(total > 0, np.maximum(-entropy, 0.0), np.inf)


def head_weights(
    entropy: Floats,
    eligible: NDArray[np.bool_],
    *,
    groups: int,
    zeta: float,
    tau: float = 1.0,
    kind: HeadWeights = "renyi",
) -> tuple[Floats, int]:
    """Floored head weights ``w = (1 - zeta) v + zeta / r`` within every GQA group.

    Args:
        entropy: ``[H_Q]`` Renyi entropies.
        eligible: ``[H_Q]``; the others get ``v = 0``.
        groups: ``G``, which divides ``H_Q``.
        zeta: floor in (0, 1].
        tau: temperature of ``v ~ exp(-H2 / tau)``.
        kind: ``"renyi"`` (``"auto"`` is the same here: profiles are found where the model is known), ``"uniform"``
            (over eligible heads), or a callable that receives entropies (``inf`` at
            ineligible heads) and eligibility, both ``[G, r]``, and returns nonnegative weights of that shape. A group
            that it gives no weight at all counts as "no preference": even among its eligible heads.

    Returns:
        ``[H_Q]`` weights and the number of groups without an eligible head.

    Raises:
        ConfigError: a callable returned another shape, a negative or a non-finite weight.
    """
    can = eligible.reshape(groups, -1)
    h2 = np.where(can, entropy.reshape(can.shape), np.inf)
    even = can.astype(np.float64)
    if kind == "uniform":
        raw = even
    elif kind in ("auto", "renyi"):
        lowest = np.min(h2, axis=1, keepdims=True, initial=np.inf)
        shift = np.where(np.isfinite(lowest), lowest, 0.0)
        raw = np.exp(-(h2 - shift) / tau)
    elif callable(kind):
        raw = _plugged_in(kind, h2, can)
    else:
        raise ConfigError(
            f"head_weights={kind!r:.60} needs the weights of a model's profile; a LocalBackend finds them by the "
            "model's fingerprint"
        )
    raw = np.where(can, raw, 0.0)
    raw = np.where(raw.sum(axis=1, keepdims=True) > 0, raw, even)
    total = raw.sum(axis=1, keepdims=True)
    r = can.shape[1]
    weights = np.where(total > 0, (1.0 - zeta) * raw / np.where(total > 0, total, 1.0) + zeta / r, 1.0 / r)
    return weights.reshape(-1), int((~can.any(axis=1)).sum())


def profile_weights(
    v: Sequence[float] | Floats, eligible: NDArray[np.bool_], *, groups: int, zeta: float
) -> tuple[Floats, int]:
    """Floored weights of a profile, over the whole layer: ``w = G ((1 - zeta) v + zeta / H_Q)`` (correction 6).

    Scaled by G so that ``(1/G) sum_h w[h] pbar[h]`` pools as it does with weights of groups: the floor is ``zeta / r``
    and both forms of the envelope stay as they are.

    Args:
        v: ``[H_Q]`` nonnegative; ineligible heads lose theirs, the others are normalised.
        eligible: ``[H_Q]``.
        groups: ``G``.
        zeta: floor in (0, 1].

    Returns:
        ``[H_Q]`` weights summing to G (even where no picked head is eligible), and the number of groups without an
        eligible head.

    Raises:
        ConfigError: the profile is of a model with another number of heads, or holds a negative weight.
    """
    shares = np.asarray(v, dtype=np.float64)
    heads = len(eligible)
    if shares.shape != (heads,) or not (np.isfinite(shares).all() and (shares >= 0).all()):
        raise ConfigError(
            f"the profile's weights {shares.tolist()} are not one nonnegative weight for each of {heads} query heads; "
            "it was made for another model: make one with `entroprefill calibrate`"
        )
    raw = np.where(eligible, shares, 0.0)
    total = float(raw.sum())
    share = raw / total if total > 0 else np.full(heads, 1.0 / heads)
    empty = int((~eligible.reshape(groups, -1).any(axis=1)).sum())
    return groups * ((1.0 - zeta) * share + zeta / heads), empty


def _plugged_in(weigh: Callable[..., Any], entropy: Floats, eligible: NDArray[np.bool_]) -> Floats:
    name = getattr(weigh, "__qualname__", type(weigh).__name__)
    raw = np.asarray(weigh(entropy.copy(), eligible.copy()), dtype=np.float64)
    if raw.shape != eligible.shape:
        raise ConfigError(
            f"head_weights callable {name} returned shape {raw.shape}; return one weight per head, [groups, heads per "
            f"group] = {eligible.shape}"
        )
    bad = raw[eligible & ~(np.isfinite(raw) & (raw >= 0))]
    if bad.size:
        raise ConfigError(
            f"head_weights callable {name} returned {bad[0]} for an eligible head; weights must be finite and >= 0 "
            "(they are normalised and floored by zeta afterwards)"
        )
    # Only ratios inside a group matter, and the sum of huge finite weights would overflow.
    top = np.max(np.where(eligible, raw, 0.0), axis=1, keepdims=True)
    return np.asarray(raw / np.where(top > 0, top, 1.0), dtype=np.float64)


def pool_heads(
    mean_rows: Floats | NDArray[np.float32],
    region: NDArray[np.int64],
    *,
    groups: int,
    mu_min: float,
    tau: float,
    zeta: float,
    kind: HeadWeights = "renyi",
    layer: int | None = None,
) -> Pooling:
    """Eligibility, entropy and floored weight of every head of a layer.

    Args:
        mean_rows: ``[H_Q, n]`` mean attention ``pbar`` of the proposal rows.
        region: ``[T]`` token positions over which eligibility and entropy are taken: all outside the sinks (paper), or
            the chunk tokens outside the sinks, so that a head locked on a delimiter is not taken for a focused one.
        groups: ``G``.
        mu_min: least mass on the region of an eligible head, > 0.
        tau: temperature.
        zeta: floor.
        kind: see :func:`head_weights`; or the weights of a profile, which hold for the layers it names.
        layer: the layer's index, for a profile.
    """
    mass, entropy = renyi_entropy(np.asarray(mean_rows[:, region], dtype=np.float64))
    eligible = mass >= mu_min
    if isinstance(kind, HeadProfile):
        v = None if layer is None else kind.at(layer)
        if v is not None:
            weights, empty = profile_weights(v, eligible, groups=groups, zeta=zeta)
            return Pooling(mass, entropy, eligible, weights, empty, "profile", np.array(v) > 0)
        kind = "renyi"
    weights, fallback = head_weights(entropy, eligible, groups=groups, zeta=zeta, tau=tau, kind=kind)
    weighting: Weighting = "callable" if callable(kind) else "uniform" if kind == "uniform" else "renyi"
    return Pooling(mass, entropy, eligible, weights, fallback, weighting)


def pooled_tokens(mean_rows: Floats | NDArray[np.float32], weights: Floats, groups: int) -> Floats:
    """Pooled token mass ``P[j] = (1/G) sum_h w[h] pbar[h, j]``; sinks stay in.

    Args:
        mean_rows: ``[H_Q, n]``.
        weights: ``[H_Q]``.
        groups: ``G``.

    Returns:
        ``[n]``.
    """
    return np.asarray(weights @ np.asarray(mean_rows, dtype=np.float64) / groups)


def pooled_chunks(masses: Floats, weights: Floats, groups: int) -> Floats:
    """Pooled chunk mass ``A_i``, from the float64 masses themselves so that the envelope holds to rounding.

    Args:
        masses: ``[H_Q, W_p, k]`` of the proposal rows.
        weights: ``[H_Q]``.
        groups: ``G``.

    Returns:
        ``[k]``.
    """
    return np.asarray(weights @ masses.mean(axis=1) / groups)
