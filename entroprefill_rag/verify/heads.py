"""Checks of the heads of one layer: their weights, and how many of them decided (section 3, correction 6)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.config import HeadProfile
from entroprefill_rag.record import LayerTrial
from entroprefill_rag.rule.pooling import profile_weights
from entroprefill_rag.verify.facts import Facts
from entroprefill_rag.verify.findings import ABSOLUTE, RELATIVE, Findings

Floats = NDArray[np.float64]

_VANISHING = 20.0
"""A head's share of its group vanishes in nine digits once its entropy, over tau, is this much above the least."""


def check_heads(trial: LayerTrial, facts: Facts, path: str, found: Findings) -> None:
    """Weights: floored and normalised; heads and groups counted from them."""
    model, zeta = facts.record.model, facts.config.zeta
    heads, groups = model.query_heads, model.kv_heads
    weights = np.array(trial.head_weights)
    if not found.expect(f"{path}.head_weights", len(weights), heads, "one weight per query head"):
        return
    profile = _profile(trial, facts)
    weighed = trial.verdict.code != "not_finite" or bool(trial.pooled_mass)
    named = facts.config.head_weights
    weighting = "callable" if facts.plugged_in else "uniform" if named == "uniform" else "renyi"
    follows = None if not weighed else "profile" if profile is not None else weighting
    found.expect(f"{path}.weighting", trial.weighting, follows, "as configured")
    floor = zeta * groups / heads
    most = 1.0 if profile is None else float(groups)
    found.between(f"{path}.head_weights", weights.tolist(), [floor] * heads, [most] * heads, "w >= zeta / r")
    if profile is not None:
        _check_profile(trial, profile, facts, path, found)
        return
    sums = weights.reshape(groups, -1).sum(axis=1).tolist()
    if found.expect(f"{path}.head_weights", sums, [1.0] * groups, "weights sum to 1 within a group"):
        _check_counts(trial, weights.reshape(groups, -1), facts, path, found)


def _profile(trial: LayerTrial, facts: Facts) -> Floats | None:
    """``[H_Q]`` what a profile weighs the heads of this layer by; None where none does."""
    named = facts.config.head_weights
    v = named.at(trial.layer) if isinstance(named, HeadProfile) and trial.verdict.code != "not_finite" else None
    return None if v is None else np.array(v)


def _check_profile(trial: LayerTrial, v: Floats, facts: Facts, path: str, found: Findings) -> None:
    groups, zeta = facts.record.model.kv_heads, facts.config.zeta
    weights = np.array(trial.head_weights)
    above = weights > zeta * groups / len(weights) * (1 + 2 * RELATIVE) + ABSOLUTE
    deciding = above & (v > 0) if trial.eligible_heads else np.zeros(len(v), dtype=np.bool_)
    follows, _ = profile_weights(v.tolist(), deciding, groups=groups, zeta=zeta)
    rule = "G ((1 - zeta) v + zeta / H_Q), v of the profile's eligible heads"
    found.expect(f"{path}.head_weights", weights.tolist(), follows.tolist(), rule)
    if zeta < 1.0:
        found.expect(f"{path}.eligible_heads", trial.eligible_heads, int(deciding.sum()), "heads above the floor")
    most = int((~deciding.reshape(groups, -1).any(axis=1)).sum())
    found.require(
        0 <= trial.fallback_groups <= most, f"{path}.fallback_groups", trial.fallback_groups, f"at most {most}", rule
    )


def _check_counts(trial: LayerTrial, grouped: Floats, facts: Facts, path: str, found: Findings) -> None:
    """How many heads are eligible, and how many groups have none, as far as weights show it."""
    zeta, r = facts.config.zeta, grouped.shape[1]
    even = np.asarray((np.abs(grouped - 1.0 / r) <= ABSOLUTE + RELATIVE).all(axis=1)) | (zeta == 1.0)
    plain = int(even.sum()) - trial.fallback_groups
    found.require(
        0 <= plain <= int(even.sum()),
        f"{path}.fallback_groups",
        trial.fallback_groups,
        f"at most {int(even.sum())}",
        "a group without eligible heads weighs them evenly",
    )
    uneven = grouped[~even]
    certain = int((uneven > zeta / r * (1 + 2 * RELATIVE) + ABSOLUTE).sum())
    # Entropies differ by at most ln n; an evenly weighted group has all its heads eligible or none, except at zeta = 1.
    told_apart = zeta < 1.0 and math.log(facts.record.prompt.tokens) / facts.config.tau < _VANISHING
    shown = told_apart and not facts.plugged_in
    low = plain * (r if shown else 1) + max(certain, len(uneven))
    high = plain * r + (certain if shown else uneven.size)
    found.require(
        low <= trial.eligible_heads <= high,
        f"{path}.eligible_heads",
        trial.eligible_heads,
        f"from {low} to {high}",
        "an ineligible head has the least weight, a group without an eligible one weighs evenly",
    )
