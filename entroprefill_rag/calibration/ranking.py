"""How well a score finds gold chunks: recall at a share of the chunks, and AUC, for many questions at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """Questions side by side, padded to the most chunks ``K`` of any.

    Attributes:
        tokens: ``[Q, K]`` chunk lengths, 1 at padding.
        there: ``[Q, K]`` False at padding.
        gold: ``[Q, K]``.
    """

    tokens: Floats
    there: Bools
    gold: Bools

    @classmethod
    def of(cls, tokens: Sequence[NDArray[np.int64]], gold: Sequence[Sequence[int]]) -> Batch:
        """From chunk lengths ``[k]`` and gold positions of every question."""
        shape = len(tokens), max(len(one) for one in tokens)
        lengths, there, marked = np.ones(shape), np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
        for q, (one, places) in enumerate(zip(tokens, gold, strict=True)):
            lengths[q, : len(one)] = np.maximum(one, 1)
            there[q, : len(one)] = True
            marked[q, list(places)] = True
        return cls(lengths, there, marked)

    def chosen(self, questions: NDArray[np.int64] | Bools) -> Batch:
        """Some of the questions."""
        return Batch(self.tokens[questions], self.there[questions], self.gold[questions])

    def kept(self, share: float) -> NDArray[np.int64]:
        """``[Q]`` how many chunks a share of them is, rounded up."""
        return np.asarray(np.ceil(share * self.there.sum(axis=1) - 1e-9), dtype=np.int64)

    def chance(self, share: float) -> float:
        """Recall of a random choice."""
        return float((self.kept(share) / self.there.sum(axis=1)).mean())


def stack(masses: Sequence[Floats], batch: Batch) -> Floats:
    """Chunk masses ``[H_Q, k]`` of every question as ``[Q, H_Q, K]``, 0 at padding."""
    out = np.zeros((len(masses), masses[0].shape[0], batch.there.shape[1]))
    for q, one in enumerate(masses):
        out[q, :, : one.shape[1]] = one
    return out


def pooled(masses: Floats, weights: Floats, batch: Batch) -> Floats:
    """Pooled mass per token ``[Q, K]``: the order of removal, up to smoothing and concentration (section 4).

    Args:
        masses: ``[Q, H_Q, K]``.
        weights: ``[H_Q]``, or ``[Q, H_Q]`` where they differ by question.
        batch: the questions.
    """
    each = np.broadcast_to(weights, masses.shape[:2])
    return np.asarray(np.einsum("qh,qhk->qk", each, masses) / batch.tokens)


def recall(scores: Floats, batch: Batch, share: float) -> Floats:
    """``[Q]`` share of the gold chunks among the highest scored; of equal scores the earlier chunk counts as higher."""
    place = np.argsort(np.argsort(-np.where(batch.there, scores, -np.inf), axis=1, kind="stable"), axis=1)
    kept = place < batch.kept(share)[:, None]
    return np.asarray((kept & batch.gold).sum(axis=1) / np.maximum(batch.gold.sum(axis=1), 1))


def auc(scores: Floats, batch: Batch) -> Floats:
    """``[Q]`` chance that a gold chunk scores above another chunk, ties by half; 0.5 where there is none to compare."""
    other = batch.there & ~batch.gold
    pairs = batch.gold[:, :, None] & other[:, None, :]
    difference = scores[:, :, None] - scores[:, None, :]
    won = np.where(pairs, (difference > 0) + 0.5 * (difference == 0), 0.0).sum(axis=(1, 2))
    count = pairs.sum(axis=(1, 2))
    return np.asarray(np.where(count > 0, won / np.maximum(count, 1), 0.5))


def head_auc(masses: Floats, batch: Batch) -> Floats:
    """``[Q, H_Q]`` AUC of every head by itself."""
    return np.stack([auc(masses[:, h] / batch.tokens, batch) for h in range(masses.shape[1])], axis=1)


def interval(values: Floats, rng: np.random.Generator, *, draws: int = 1000) -> tuple[float, float, float]:
    """Mean and 95% bootstrap interval over questions."""
    again = values[rng.integers(len(values), size=(draws, len(values)))].mean(axis=1)
    low, high = np.quantile(again, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)
