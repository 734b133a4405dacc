"""Which heads of a layer are picked: few parameters, shrunk, cross-validated over questions.

Heads are ranked by their AUC on training questions; the best ``n`` share all weight evenly: a layer has one parameter
beside the ranking. ``n`` comes from cross-validation; of those within one standard error of the best, the largest is
taken (Breiman et al. 1984): more heads, less to overfit (correction 13). Questions from one text stay on one side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.calibration.ranking import Batch, auc, pooled

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

COUNTS = (1, 2, 3, 4, 6, 8)


def folds_of(groups: Places, folds: int, rng: np.random.Generator) -> Places:
    """``[Q]`` the fold of every question; questions of a group share one."""
    names = rng.permutation(np.unique(groups))
    order = {name: i % folds for i, name in enumerate(names.tolist())}
    return np.array([order[group] for group in groups.tolist()], dtype=np.int64)


def floored(v: Floats, zeta: float) -> Floats:
    """``w = (1 - zeta) v + zeta / H_Q`` (correction 6)."""
    return (1.0 - zeta) * v + zeta / len(v)


def top(by_head: Floats, n: int) -> Floats:
    """``[H_Q]`` weights: an even share for each of the ``n`` heads of the highest mean AUC.

    Args:
        by_head: ``[Q, H_Q]``.
        n: heads.
    """
    v = np.zeros(by_head.shape[1])
    v[np.argsort(-by_head.mean(axis=0), kind="stable")[:n]] = 1.0 / n
    return v


def counts_of(heads: int) -> tuple[int, ...]:
    """Numbers of heads that are tried; all of them last, which is the plain mean."""
    return (*(n for n in COUNTS if n < heads), heads)


def pick(masses: Floats, by_head: Floats, batch: Batch, fold: Places, *, zeta: float) -> tuple[Floats, int]:
    """The weights of one layer.

    Args:
        masses: ``[Q, H_Q, K]``.
        by_head: ``[Q, H_Q]`` AUC of every head by itself.
        batch: the questions.
        fold: ``[Q]``.
        zeta: floor that the weights will get.

    Returns:
        ``[H_Q]`` ``v``, and how many heads share it.
    """
    counts = counts_of(masses.shape[1])
    found = np.zeros((len(counts), len(fold)))
    for held in np.unique(fold):
        out = fold == held
        for c, n in enumerate(counts):
            v = top(by_head[~out], n)
            found[c, out] = auc(pooled(masses[out], floored(v, zeta), batch.chosen(out)), batch.chosen(out))
    best = int(found.mean(axis=1).argmax())
    behind = found[best] - found
    spread = behind.std(axis=1, ddof=1) / np.sqrt(len(fold))
    n = max(n for c, n in enumerate(counts) if behind[c].mean() <= spread[c])
    return top(by_head, n), n


def held_out(
    masses: Floats, by_head: Floats, batch: Batch, fold: Places, rng: np.random.Generator, *, zeta: float
) -> Floats:
    """``[Q, K]`` pooled mass per token of every question under weights picked on the other folds alone.

    The number of heads, too, is chosen without the held-out fold: what comes out is not flattered by the choice.
    """
    scores = np.zeros(batch.there.shape)
    folds = len(np.unique(fold))
    for held in np.unique(fold):
        out = fold == held
        inner = folds_of(fold[~out], folds - 1, rng) if folds > 2 else np.arange((~out).sum(), dtype=np.int64) % 2
        v, _ = pick(masses[~out], by_head[~out], batch.chosen(~out), inner, zeta=zeta)
        scores[out] = pooled(masses[out], floored(v, zeta), batch.chosen(out))
    return scores
