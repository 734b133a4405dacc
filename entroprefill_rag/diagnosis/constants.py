"""From two runs side by side to the constants of the conditional bound, on the very states that it speaks of.

Each is the largest ratio seen, an estimate for any other request. On this request they are true, so the theorem must
hold with them: ``tests/diagnosis`` checks that it does.
"""

from __future__ import annotations

import numpy as np

from entroprefill_rag.diagnosis.heads import Floats
from entroprefill_rag.diagnosis.lockstep import SideBySide
from entroprefill_rag.diagnosis.paired import LayerStep
from entroprefill_rag.diagnosis.results import FixedRows, MeasuredLayer
from entroprefill_rag.rule.stability import fixed_row_bound, token_bound

# A difference below this many rounding units of the states is noise, and a ratio of noise is no constant.
_NOISE = 16.0
# Fixed rows: rounding of a float32 softmax and product, as a share of the largest value.
_ROUNDING = 1e-5
_NOTICEABLE = 1e-4


def measured_layer(step: LayerStep, eta: Floats, epsilon: float) -> MeasuredLayer:
    """The constants of one layer.

    Args:
        step: what the layer did.
        eta: ``[H_Q]`` largest discarded mass of a retained row at the pruned layer.
        epsilon: rounding unit of the states.
    """
    if step.heads.value_norm is None or step.heads.value_diameter is None:
        raise ValueError(f"layer {step.layer} was read without its values")
    before, stretched = float(step.before.max()), float(step.stretched.max())
    largest = step.heads.eta.max(axis=1)
    ratios = _token_ratios(step, epsilon)
    seen = ratios[np.isfinite(ratios)]
    return MeasuredLayer(
        layer=step.layer,
        lipschitz=stretched / before if before > 0.0 else None,
        drift=float((largest - eta).max()),
        eta=tuple(map(float, largest)),
        eta_mean=float(step.heads.eta.mean()),
        value_norm=tuple(map(float, step.heads.value_norm)),
        value_diameter=tuple(map(float, step.heads.value_diameter)),
        token_map=float(seen.max()) if len(seen) else None,
        token_map_rows=len(seen),
        requests=1,
        rows=len(step.before),
    )


def _token_ratios(step: LayerStep, epsilon: float) -> Floats:
    """(M) ``[n']``: change of the layer's output over change of the attention module's; NaN where that is noise."""
    clear = step.attention > _NOISE * epsilon * step.size
    return np.divide(step.added, step.attention, out=np.full_like(step.added, np.nan), where=clear)


def token_distances(both: SideBySide) -> Floats:
    """Bound of every retained token after every layer, ``[T, n']``, by the recursion token by token.

    Its constants are this request's: each token's own stretch and token map (the layer's largest where its own is
    noise), value diameters, and each row's own discarded mass.
    """
    stretch, added = [], []
    for step in both.steps:
        reach = np.maximum.accumulate(step.before)
        stretch.append(np.divide(step.stretched, reach, out=np.zeros_like(reach), where=reach > 0.0))
        ratios = _token_ratios(step, both.epsilon)
        known = ratios[np.isfinite(ratios)]
        through = np.where(np.isfinite(ratios), ratios, known.max() if len(known) else 0.0)
        diameter = np.zeros(0) if step.heads.value_diameter is None else step.heads.value_diameter
        added.append(through * (diameter @ step.heads.eta))
    return token_bound(np.array(stretch), np.array(added))


def fixed_rows(step: LayerStep) -> FixedRows:
    """The fixed-row bound against the true change, on every retained row of every head of one layer."""
    heads = step.heads
    if heads.change is None or heads.value_norm is None or heads.value_diameter is None:
        raise ValueError(f"layer {step.layer} was read without its values")
    slack = _ROUNDING * heads.value_norm[:, None]
    by_norm = fixed_row_bound(heads.eta, heads.value_norm[:, None])
    by_diameter = heads.eta * heads.value_diameter[:, None]
    noticed = heads.eta > _NOTICEABLE
    tightness = [_tightness(heads.change, bound, noticed) for bound in (by_norm, by_diameter)]
    return FixedRows(
        rows=int(heads.eta.size),
        violations=int((heads.change > by_norm + slack).sum()),
        tightest=tightness[0][0],
        median=tightness[0][1],
        diameter_violations=int((heads.change > by_diameter + slack).sum()),
        diameter_tightest=tightness[1][0],
        diameter_median=tightness[1][1],
    )


def _tightness(change: Floats, bound: Floats, noticed: np.ndarray) -> tuple[float | None, float | None]:
    """Largest and median share of the bound that is used."""
    counted = noticed & (bound > 0.0)
    if not counted.any():
        return None, None
    share = change[counted] / bound[counted]
    return float(share.max()), float(np.median(share))
