"""Which heads of several layers rank chunks together: those that find the gold chunk in every form of question.

A head may be good at one form only, such as finding a sentence that is asked for word by word. So heads are ordered by
their AUC in the form in which they do worst; the best ``n`` have the same say, and ``n`` comes from cross-validation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.calibration.heads import folds_of
from entroprefill_rag.calibration.ranking import Batch, auc, pooled

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

COUNTS = (1, 2, 3, 4, 6, 8)


def in_every_form(by_head: Floats, forms: Sequence[str]) -> Floats:
    """``[H]`` the lowest over forms of the mean AUC of every head.

    Args:
        by_head: ``[Q, H]``.
        forms: ``[Q]``.
    """
    names = np.array(forms)
    return np.asarray(np.min([by_head[names == form].mean(axis=0) for form in sorted(set(forms))], axis=0))


def best(by_head: Floats, forms: Sequence[str], n: int) -> Floats:
    """``[H]`` shares: the same for each of the ``n`` heads that do best where they do worst."""
    v = np.zeros(by_head.shape[1])
    v[np.argsort(-in_every_form(by_head, forms), kind="stable")[:n]] = 1.0 / n
    return v


def pick_across(shares: Floats, by_head: Floats, batch: Batch, fold: Places, forms: Sequence[str]) -> Floats:
    """The heads that rank chunks together.

    Args:
        shares: ``[Q, H, K]`` chunk masses of every head, 1 over the chunks.
        by_head: ``[Q, H]`` AUC of every head by itself.
        batch: the questions.
        fold: ``[Q]``.
        forms: ``[Q]``.

    Returns:
        ``[H]`` shares that sum to 1: those of the number of heads with the best AUC on held-out folds, of equal ones
        the smaller.
    """
    counts = [n for n in COUNTS if n <= shares.shape[1]]
    found = np.zeros((len(counts), len(fold)))
    for held in np.unique(fold):
        out = fold == held
        inside = [form for form, left in zip(forms, out, strict=True) if not left]
        for c, n in enumerate(counts):
            v = best(by_head[~out], inside, n)
            found[c, out] = auc(pooled(shares[out], v, batch.chosen(out)), batch.chosen(out))
    return best(by_head, forms, counts[int(found.mean(axis=1).argmax())])


def held_out_across(
    shares: Floats, by_head: Floats, batch: Batch, fold: Places, forms: Sequence[str], rng: np.random.Generator
) -> Floats:
    """``[Q, K]`` evidence per token under heads, and their number, picked on the other folds alone."""
    scores = np.zeros(batch.there.shape)
    folds = len(np.unique(fold))
    for held in np.unique(fold):
        out = fold == held
        inner = folds_of(fold[~out], folds - 1, rng) if folds > 2 else np.arange((~out).sum(), dtype=np.int64) % 2
        inside = [form for form, left in zip(forms, out, strict=True) if not left]
        v = pick_across(shares[~out], by_head[~out], batch.chosen(~out), inner, inside)
        scores[out] = pooled(shares[out], v, batch.chosen(out))
    return scores
