"""``diagnose`` one request: how far the pruned run is from the full one, layer by layer, and what the bounds say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.diagnosis.constants import fixed_rows, measured_layer, token_distances
from entroprefill_rag.diagnosis.head import HeadConstant, divergence, head_constant, margin
from entroprefill_rag.diagnosis.heads import Floats
from entroprefill_rag.diagnosis.lockstep import SideBySide, run_side_by_side
from entroprefill_rag.diagnosis.results import Diagnosis, LayerDiagnosis, MeasuredLayer, NextToken, assumptions_of
from entroprefill_rag.engine.backend import LocalBackend
from entroprefill_rag.errors import ConfigError, RequestError
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.request import RagRequest
from entroprefill_rag.rule.stability import conditional_bound


@dataclass(frozen=True)
class Removal:
    """What is removed, and on whose word.

    Attributes:
        layer: the last layer with all tokens; None where nothing is removed.
        chunks: positions of the removed chunks.
        forced: not accepted by the rule.
        reason: the rule's verdict, or who asked.
    """

    layer: int | None
    chunks: tuple[int, ...]
    forced: bool
    reason: str


def diagnose(
    backend: LocalBackend,
    request: RagRequest,
    config: PruningConfig | None = None,
    *,
    layer: int | None = None,
    removed: Sequence[str] | None = None,
) -> Diagnosis:
    """Run a request in full and pruned, and compare.

    Without ``layer`` and ``removed`` the rule decides. With ``layer``, it is asked at that layer only, and the set it
    proposes there is removed even if it was not accepted. With ``removed`` too, those chunks are.

    Args:
        backend: a local model.
        request: the question over its chunks.
        config: limits and audit; the defaults where None.
        layer: the last layer with all tokens.
        removed: ids of chunks to remove.

    Returns:
        The diagnosis; ``layer`` is None in it where nothing was pruned.

    Raises:
        ConfigError: a layer that cannot be pruned at, ``removed`` without ``layer``, a model that cannot be diagnosed.
        RequestError: ``removed`` names no chunk, one that is not there, or one that is protected.
    """
    config = config or PruningConfig()
    layout = backend.layout(request, config)
    removal = choose_removal(backend, request, layout, config, layer=layer, removed=removed)
    if removal.layer is None:
        return Diagnosis(
            model=backend.name,
            prompt=layout.hash,
            tokens=layout.n_tokens,
            retained=layout.n_tokens,
            layer=None,
            removed=(),
            forced=False,
            reason=removal.reason,
            eta=(),
            layers=(),
            next_token=None,
        )
    kept = kept_tokens(layout, removal.chunks)
    both = run_side_by_side(backend, layout, removal.layer, kept)
    head = head_of(backend, both)
    eta = both.eta.max(axis=1)
    layers = _layers(both, head, eta)
    return Diagnosis(
        model=backend.name,
        prompt=layout.hash,
        tokens=layout.n_tokens,
        retained=len(kept),
        layer=removal.layer,
        removed=tuple(layout.chunk_ids[chunk] for chunk in removal.chunks),
        forced=removal.forced,
        reason=removal.reason,
        eta=tuple(map(float, eta)),
        layers=layers,
        next_token=_next_token(both, head, layers[-1]),
    )


def choose_removal(
    backend: LocalBackend,
    request: RagRequest,
    layout: PromptLayout,
    config: PruningConfig,
    *,
    layer: int | None,
    removed: Sequence[str] | None,
) -> Removal:
    """What to remove: see :func:`diagnose`."""
    if layer is None:
        if removed is not None:
            raise ConfigError("removed chunks need the layer above which they are gone; give `layer` too")
        record = backend.prune(request, config).audit
        if record.accepted_layer is None:
            return Removal(None, (), False, record.reason.message)
        gone = tuple(i for i, chunk in enumerate(record.prompt.chunks) if not chunk.kept)
        return Removal(record.accepted_layer, gone, False, record.reason.message)
    depth = len(backend.anatomy.layers)
    if not 1 <= layer <= depth - 2:
        raise ConfigError(f"nothing can be pruned at layer {layer} of {depth}; choose from 1..{depth - 2}")
    if removed is not None:
        return Removal(layer, _positions(layout, removed), True, "The caller chose the layer and the chunks.")
    record = backend.prune(request, config.model_copy(update={"layers": (layer,), "streak": 1})).audit
    proposed = record.trials[-1].removed if record.trials else ()
    accepted = record.accepted_layer == layer
    return Removal(layer if proposed else None, proposed, not accepted, record.reason.message)


def kept_tokens(layout: PromptLayout, removed: Sequence[int]) -> Tensor:
    """Ascending positions of the tokens outside the removed chunks, int64 ``[n']``."""
    keep = torch.ones(layout.n_tokens, dtype=torch.bool)
    for chunk in removed:
        keep[slice(*layout.chunk_spans[chunk])] = False
    return keep.nonzero().flatten()


def head_of(backend: LocalBackend, both: SideBySide) -> HeadConstant | None:
    """The constant of the head between this request's two last states."""
    with torch.inference_mode():
        states = (both.full_last, both.pruned_last)
        return head_constant(backend.model, backend.anatomy.decoder, states, both.full_logits)


def _positions(layout: PromptLayout, removed: Sequence[str]) -> tuple[int, ...]:
    wrong = [name for name in removed if name not in layout.chunk_ids]
    if wrong or not removed:
        raise RequestError(
            f"chunks to remove must be among those of the prompt, got {wrong or 'none'}; there are "
            f"{list(layout.chunk_ids)[:20]}"
        )
    found = tuple(sorted({layout.chunk_ids.index(name) for name in removed}))
    kept = [layout.chunk_ids[i] for i in found if layout.protected_reasons[i] is not None]
    if kept:
        raise RequestError(f"chunks {kept} are protected and cannot be removed; leave them out of `removed`")
    return found


def _layers(both: SideBySide, head: HeadConstant | None, eta: Floats) -> tuple[LayerDiagnosis, ...]:
    measured: list[MeasuredLayer] = [measured_layer(step, eta, both.epsilon) for step in both.steps]
    # Distances do not depend on the head's constant.
    plain, sharp = (
        conditional_bound(assumptions_of(measured, head.lipschitz if head else 0.0, None, diameters=sharper), eta)
        for sharper in (False, True)
    )
    tokens = token_distances(both)
    return tuple(
        LayerDiagnosis(
            **one.model_dump(),
            distance=float(step.after.max()),
            relative=float((step.after / step.norms).max()),
            last_distance=float(step.after[-1]),
            bound=float(plain.distance[i]),
            bound_diameter=float(sharp.distance[i]),
            bound_token=float(tokens[i].max()),
            last_bound_token=float(tokens[i, -1]),
            fixed_rows=fixed_rows(step),
        )
        for i, (one, step) in enumerate(zip(measured, both.steps, strict=True))
    )


def _next_token(both: SideBySide, head: HeadConstant | None, last: LayerDiagnosis) -> NextToken:
    full, pruned = both.full_logits, both.pruned_logits
    margins = margin(full), margin(pruned)
    bounds = [head.lipschitz * reach for reach in (last.bound, last.last_bound_token)] if head else []
    return NextToken(
        divergence=divergence(full, pruned),
        top1_agrees=int(full.argmax()) == int(pruned.argmax()),
        largest_change=float(abs(full - pruned).max()),
        margin_full=margins[0],
        margin_pruned=margins[1],
        logit_lipschitz=head.lipschitz if head else None,
        logit_cap=head.cap if head else None,
        logit_bound=bounds[0] if bounds else None,
        logit_bound_token=bounds[1] if bounds else None,
        proved=bool(bounds) and min(bounds) < 0.5 * max(margins),
    )
