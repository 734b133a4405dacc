"""From what was measured to a profile: monitored layers, head weights, thresholds, suggested caps, and the evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.calibration.across import held_out_across, pick_across
from entroprefill_rag.calibration.heads import folds_of, held_out, pick
from entroprefill_rag.calibration.measure import Measured
from entroprefill_rag.calibration.profile import CapCurve, Estimate, LayerEvidence, ModelProfile, Training
from entroprefill_rag.calibration.questions import HARD
from entroprefill_rag.calibration.ranking import Batch, auc, head_auc, interval, pooled, recall, stack
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import ProfileError
from entroprefill_rag.record import ModelInfo
from entroprefill_rag.rule.pooling import head_weights
from entroprefill_rag.rule.removal import RemovalProblem, greedy_removal, within_reach

Floats = NDArray[np.float64]

SHARE = 0.25
CAPS = (0.1, 0.2, 0.3, 0.5)
SAVINGS = (0.25, 0.5)
LEAST_QUESTIONS = 20
MOST_LAYERS = 5
MISTAKES = 1.4
"""How many times the best layer's mistakes (1 - AUC) a monitored layer may make. Training questions are easier than
real ones: where nearly all are answered, what little is left between layers is what tells them apart."""
SPARE = 0.002
"""What it may make beyond that, which one question in a hundred decides."""
LEAST_MASS = 0.1
"""Mean mass on the documents of a monitored layer, over heads and questions."""
CLEARLY = 1.1
"""How many times more work a later layer must save to make an earlier one pointless."""
DEEPEST = 0.8
"""Share of the stack above which too little is left to save."""
_FOLDS = 5


@dataclass(frozen=True)
class _Seen:
    """All questions at all layers, for picking heads across layers.

    Attributes:
        shares: ``[Q, L, H_Q, K]`` evidence of every head by itself (:func:`.excess`).
        by_head: ``[Q, L, H_Q]`` AUC of every head by itself.
        mass_low: ``[L, H_Q]`` 5% quantile over questions of the mass of each head's question rows.
    """

    shares: Floats
    by_head: Floats
    mass_low: Floats

    @classmethod
    def of(cls, measured: Sequence[Measured], batch: Batch) -> _Seen:
        """From the measurements; a head without mass on the chunks is as good as one that looks evenly."""
        seen = [one.excess() for one in measured]
        layers = range(len(measured[0].layers))
        shares = np.stack([stack([excess[at] for excess, _ in seen], batch) for at in layers], axis=1)
        mass = np.stack([own for _, own in seen])
        by_head = np.stack([head_auc(shares[:, at], batch) for at in layers], axis=1)
        return cls(shares, by_head, np.quantile(mass, 0.05, axis=0))

    def up_to(self, at: int) -> tuple[Floats, Floats]:
        """``[Q, H, K]`` shares and ``[Q, H]`` AUC of the heads of the first ``at + 1`` layers, side by side."""
        shares, by_head = self.shares[:, : at + 1], self.by_head[:, : at + 1]
        return shares.reshape(len(shares), -1, shares.shape[-1]), by_head.reshape(len(by_head), -1)


Heads = tuple[tuple[int, int, float], ...]
"""Place of a layer among the measured ones, head, share."""


def fit(
    measured: Sequence[Measured],
    forms: Sequence[str],
    groups: Sequence[int],
    model: ModelInfo,
    *,
    source: str,
    seed: int = 0,
    versions: dict[str, str] | None = None,
) -> ModelProfile:
    """Fit a profile.

    Args:
        measured: training questions, at least ``LEAST_QUESTIONS``, all with the same monitorable layers.
        forms: their forms.
        groups: which text each came from; questions of one text stay on one side of a split.
        model: the model.
        source: where the texts come from.
        seed: of folds and bootstrap.
        versions: of the libraries.

    Raises:
        ProfileError: too few questions, or no layer whose choice is better than chance.
    """
    everything = _same_layers(measured, forms, groups)
    hard = [one for one, form in zip(everything[0], everything[1], strict=True) if form in HARD]
    measured, forms, groups = _without_hard(*everything)
    if len(measured) < LEAST_QUESTIONS or len(set(groups)) < _FOLDS:
        raise ProfileError(
            f"{len(measured)} training questions from {len(set(groups))} texts are too few; at least {LEAST_QUESTIONS} "
            f"from {_FOLDS} are needed: give more documents or raise --questions"
        )
    batch = Batch.of([one.tokens for one in measured], [one.gold for one in measured])
    rng = np.random.default_rng(seed)
    fold = folds_of(np.array(groups), _FOLDS, rng)
    config = PruningConfig()
    seen, layers = _Seen.of(measured, batch), measured[0].layers
    ranking = [_ranking_heads(at, seen, batch, fold, forms) for at in range(len(layers))]
    found = [
        _fit_layer(at, layer, measured, forms, seen, ranking[at], batch, fold, rng, model, config)
        for at, layer in enumerate(layers)
    ]
    if hard:
        found = [_with_hard(one, ranking[at], hard, rng) for at, one in enumerate(found)]
    chance = batch.chance(SHARE)
    chosen = choose_layers(found, chance, model.layers)
    at_chosen = [one for one in found if one.layer in chosen]
    picked = [seen.mass_low[at, head] for one in at_chosen for at, head, _ in ranking[layers.index(one.layer)]]
    weights = tuple((one.layer, one.v) for one in found)
    named = tuple(
        (layer, tuple((layers[at], head, round(share, 9)) for at, head, share in heads))
        for layer, heads in zip(layers, ranking, strict=True)
    )
    return ModelProfile(
        model=model.name,
        fingerprints=(model.fingerprint,),
        dtype=model.dtype,
        query_heads=model.query_heads,
        kv_heads=model.kv_heads,
        depth=model.layers,
        layers=chosen,
        weights=weights,
        pooled=named,
        mass_min=_threshold(min(one.doc_mass_low for one in at_chosen), 0.3),
        mu_min=_threshold(float(np.median(picked)), 0.2),
        caps=_suggested_caps(
            measured, [(layers.index(layer), ranking[layers.index(layer)]) for layer in chosen], config
        ),
        training=Training(
            source=source,
            questions=len(measured),
            seed=seed,
            forms=dict(sorted(Counter(forms).items())),
            hard=len(hard),
            folds=_FOLDS,
            tokens=(min(one.n_tokens for one in measured), max(one.n_tokens for one in measured)),
            chance=_short(chance),
        ),
        evidence=tuple(found),
        versions=versions or {},
    )


def choose_layers(evidence: Sequence[LayerEvidence], chance: float, depth: int) -> tuple[int, ...]:
    """Monitored layers: the earliest that find gold nearly as well as the best one does and are worth stopping at.

    A layer qualifies when its held-out recall with pooled heads lies above chance with its whole interval, when their
    held-out AUC, which counts the whole order and so what goes first, misses 1 by at most ``MISTAKES`` times what the
    best layer misses it by, and when it looks at the documents with at least ``LEAST_MASS``: a layer of sinks loses
    little whatever goes. The first monitored layer that passes is the one that is used; so a
    layer is left out where, under caps of 0.2, a later one that qualifies saves clearly more work (chunk tokens times
    layers left). At most ``MOST_LAYERS``, since the audit's error is shared among them. Layers above ``DEEPEST`` of
    the stack, and those of little document mass, count only where no other qualifies.

    Raises:
        ProfileError: no layer is better than chance.
    """
    able = [one for one in evidence if one.pooled.low > chance]
    able = [one for one in able if one.layer <= DEEPEST * depth - 1] or able
    able = [one for one in able if one.doc_mass >= LEAST_MASS] or able
    if not able:
        raise ProfileError(
            "no layer of this model finds the gold chunk better than chance on the training questions: without a "
            "profile its default settings are used; more, or other, documents may help"
        )
    most = MISTAKES * (1.0 - max(one.pooled_auc for one in able)) + SPARE
    good = [one for one in able if 1.0 - one.pooled_auc <= most]
    work = {one.layer: _work_saved(one, depth) for one in good}
    useful = [
        one.layer
        for one in good
        if not any(later.layer > one.layer and work[later.layer] > CLEARLY * work[one.layer] for later in good)
    ]
    return tuple(useful[:MOST_LAYERS])


def _work_saved(one: LayerEvidence, depth: int) -> float:
    """Share of the prefill's work on chunks that is saved under caps of 0.2."""
    saved = next((curve.saved for curve in one.caps if curve.cap == 0.2), 0.0)
    return saved * (depth - 1 - one.layer) / depth


def _ranking_heads(at: int, seen: _Seen, batch: Batch, fold: NDArray[np.int64], forms: Sequence[str]) -> Heads:
    """The heads of this and earlier layers that rank chunks here, each with the same share."""
    v = pick_across(*seen.up_to(at), batch, fold, forms)
    heads = seen.shares.shape[2]
    return tuple((int(i) // heads, int(i) % heads, float(v[i])) for i in np.flatnonzero(v))


def _with_hard(one: LayerEvidence, heads: Heads, hard: Sequence[Measured], rng: np.random.Generator) -> LayerEvidence:
    """The same with what the ranking heads find where the sentence asked for is gone; no head was picked by that."""
    batch = Batch.of([question.tokens for question in hard], [question.gold for question in hard])
    scores = stack([_evidence(question, heads)[None] for question in hard], batch)
    return one.model_copy(update={"hard": _estimate(recall(pooled(scores, np.ones(1), batch), batch, SHARE), rng)})


def _evidence(one: Measured, heads: Heads) -> Floats:
    """``[k]`` evidence that these heads give together."""
    shares, _ = one.excess()
    return np.asarray(sum(share * shares[place, head] for place, head, share in heads))


def _fit_layer(
    at: int,
    layer: int,
    measured: Sequence[Measured],
    forms: Sequence[str],
    seen: _Seen,
    ranking: Heads,
    batch: Batch,
    fold: NDArray[np.int64],
    rng: np.random.Generator,
    model: ModelInfo,
    config: PruningConfig,
) -> LayerEvidence:
    heads, groups, zeta = model.query_heads, model.kv_heads, config.zeta
    masses = stack([one.masses[at].mean(axis=1) for one in measured], batch)
    by_head = head_auc(masses, batch)
    mass = masses.sum(axis=2)
    renyi = np.stack(
        [
            head_weights(one.entropy[at], mass[q] >= config.mu_min, groups=groups, zeta=zeta, tau=config.tau)[0]
            for q, one in enumerate(measured)
        ]
    )
    plain = pooled(masses, np.full(heads, 1.0 / heads), batch)
    unseen = held_out(masses, by_head, batch, fold, rng, zeta=zeta)
    v, n = pick(masses, by_head, batch, fold, zeta=zeta)
    across = held_out_across(*seen.up_to(at), batch, fold, forms, rng)
    documents = mass.mean(axis=1)
    return LayerEvidence(
        layer=layer,
        doc_mass=_short(documents.mean()),
        doc_mass_low=_short(np.quantile(documents, 0.05)),
        uniform=_estimate(recall(plain, batch, SHARE), rng),
        renyi=_estimate(recall(pooled(masses, renyi, batch), batch, SHARE), rng),
        profile=_estimate(recall(unseen, batch, SHARE), rng),
        pooled=_estimate(recall(across, batch, SHARE), rng),
        uniform_auc=_short(auc(plain, batch).mean()),
        profile_auc=_short(auc(unseen, batch).mean()),
        pooled_auc=_short(auc(across, batch).mean()),
        head_auc=tuple(_short(value) for value in seen.by_head[:, at].mean(axis=0)),
        head_mass=tuple(_short(value) for value in mass.mean(axis=0)),
        heads=n,
        v=tuple(round(float(share), 9) for share in v),
        caps=tuple(_curve(cap, at, measured, ranking, config) for cap in CAPS),
    )


def _removed(one: Measured, at: int, heads: Heads, config: PruningConfig, cap: float, target: float) -> tuple[int, ...]:
    """What greedy removes of one question at one layer, in the order of these heads."""
    masses, total = one.masses[at], int(one.tokens.sum())
    scores = _evidence(one, heads) / np.maximum(one.tokens, 1)
    problem = RemovalProblem(
        masses=masses,
        caps=np.full(masses.shape[:2], cap),
        tokens=one.tokens,
        removable=one.removable,
        m0=config.m0,
        target_tokens=int(np.ceil(target * total)),
        max_tokens=int(config.max_saving * total),
    )
    able = replace(problem, removable=within_reach(problem, scores)) if config.reach == "target" else problem
    return greedy_removal(able, scores).removed


def _curve(cap: float, at: int, measured: Sequence[Measured], heads: Heads, config: PruningConfig) -> CapCurve:
    gone = [_removed(one, at, heads, config, cap, 0.5) for one in measured]
    saved = [one.tokens[list(removed)].sum() / one.tokens.sum() for one, removed in zip(measured, gone, strict=True)]
    kept = [1 - len(set(one.gold) & set(removed)) / len(one.gold) for one, removed in zip(measured, gone, strict=True)]
    return CapCurve(cap=cap, saved=_short(np.mean(saved)), gold_kept=_short(np.mean(kept)))


def _suggested_caps(
    measured: Sequence[Measured], places: Sequence[tuple[int, Heads]], config: PruningConfig
) -> dict[str, float]:
    """For each wanted saving the smallest cap at which half of the questions reach it at some monitored layer."""
    found = {}
    for saving in SAVINGS:
        for cap in np.arange(1, 21) * 0.05:
            reached = [
                max(one.tokens[list(_removed(one, at, heads, config, cap, saving))].sum() for at, heads in places)
                >= saving * one.tokens.sum()
                for one in measured
            ]
            if np.mean(reached) >= 0.5:
                found[f"{saving:g}"] = round(float(cap), 2)
                break
    return found


def _same_layers(
    measured: Sequence[Measured], forms: Sequence[str], groups: Sequence[int]
) -> tuple[list[Measured], list[str], list[int]]:
    """The questions with the most common set of monitorable layers: a longer prompt may leave windows too short."""
    if not measured:
        return [], [], []
    usual = Counter(one.layers for one in measured).most_common(1)[0][0]
    kept = [i for i, one in enumerate(measured) if one.layers == usual and one.layers]
    return [measured[i] for i in kept], [forms[i] for i in kept], [groups[i] for i in kept]


def _without_hard(
    measured: Sequence[Measured], forms: Sequence[str], groups: Sequence[int]
) -> tuple[list[Measured], list[str], list[int]]:
    kept = [i for i, form in enumerate(forms) if form not in HARD]
    return [measured[i] for i in kept], [forms[i] for i in kept], [groups[i] for i in kept]


def _threshold(low: float, most: float) -> float:
    """Half of what was seen at the low end, two digits, so that prompts of other shapes pass too."""
    return float(f"{min(most, max(0.005, low / 2)):.2g}")


def _short(value: float | np.floating[Any]) -> float:
    return float(f"{float(value):.4g}")


def _estimate(values: Floats, rng: np.random.Generator) -> Estimate:
    mean, low, high = interval(values, rng)
    return Estimate(mean=_short(mean), low=_short(low), high=_short(high), n=len(values))
