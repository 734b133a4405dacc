"""``measure_assumptions`` on given requests: the largest constants seen, each an estimate, not a guarantee."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.diagnosis.constants import measured_layer
from entroprefill_rag.diagnosis.diagnose import choose_removal, head_of, kept_tokens
from entroprefill_rag.diagnosis.head import HeadConstant
from entroprefill_rag.diagnosis.lockstep import run_side_by_side
from entroprefill_rag.diagnosis.results import MeasuredAssumptions, MeasuredLayer
from entroprefill_rag.engine.backend import LocalBackend
from entroprefill_rag.request import RagRequest


def measure_assumptions(
    backend: LocalBackend,
    requests: Iterable[RagRequest],
    config: PruningConfig | None = None,
    *,
    layer: int | None = None,
) -> MeasuredAssumptions:
    """Measure the constants of the conditional bound on some requests (section 8, correction 2).

    Each number is the largest seen over requests, heads' numbers head by head. Drift is relative to the same request's
    discarded mass at its pruned layer, over all retained rows, so that it absorbs rows that no audit looks at.

    Args:
        backend: a local model.
        requests: prompts like those that the bound is wanted for.
        config: limits and audit; the defaults where None.
        layer: prune there, what the rule proposes, whether it is accepted or not; None takes accepted layers.

    Raises:
        ConfigError: a layer that cannot be pruned at, or a model that cannot be measured.
    """
    config = config or PruningConfig()
    etas: list[np.ndarray] = []
    seen: dict[int, list[MeasuredLayer]] = {}
    heads: list[HeadConstant | None] = []
    pruned_at: set[int] = set()
    skipped = rows = 0
    for request in requests:
        layout = backend.layout(request, config)
        removal = choose_removal(backend, request, layout, config, layer=layer, removed=None)
        if removal.layer is None:
            skipped += 1
            continue
        both = run_side_by_side(backend, layout, removal.layer, kept_tokens(layout, removal.chunks))
        eta = both.eta.max(axis=1)
        for step in both.steps:
            seen.setdefault(step.layer, []).append(measured_layer(step, eta, both.epsilon))
        etas.append(eta)
        heads.append(head_of(backend, both))
        pruned_at.add(removal.layer)
        rows += both.eta.shape[1]
    known = [head for head in heads if head is not None]
    complete = bool(heads) and len(known) == len(heads)
    return MeasuredAssumptions(
        model=backend.name,
        requests=len(etas),
        skipped=skipped,
        rows=rows,
        pruned_layers=tuple(sorted(pruned_at)),
        eta=_largest(etas),
        layers=tuple(_together(seen[number]) for number in sorted(seen)),
        logit_lipschitz=max(head.lipschitz for head in known) if complete else None,
        rho=min(head.rho for head in known) if complete else None,
        logit_cap=max(head.cap for head in known) if complete else None,
    )


def _together(seen: Sequence[MeasuredLayer]) -> MeasuredLayer:
    """One layer over all requests: the largest of everything."""
    total = sum(one.rows for one in seen)
    return MeasuredLayer(
        layer=seen[0].layer,
        lipschitz=_largest_known([one.lipschitz for one in seen]),
        drift=max(one.drift for one in seen),
        eta=_largest([one.eta for one in seen]),
        eta_mean=sum(one.eta_mean * one.rows for one in seen) / total,
        value_norm=_largest([one.value_norm for one in seen]),
        value_diameter=_largest([one.value_diameter for one in seen]),
        token_map=_largest_known([one.token_map for one in seen]),
        token_map_rows=sum(one.token_map_rows for one in seen),
        requests=len(seen),
        rows=total,
    )


def _largest(values: Sequence[np.ndarray | tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(float, np.max(np.array(values), axis=0))) if len(values) else ()


def _largest_known(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
