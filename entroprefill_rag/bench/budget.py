"""Equal budgets: every method that ranks chunks lets the lowest go by the rule's own greedy removal, without caps."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.rule.removal import RemovalProblem, greedy_removal


def savings(budget: float) -> dict[str, float]:
    """Settings of a ``PruningConfig`` for a budget: the share of chunk tokens that a method may keep."""
    target = round(1.0 - budget, 9)
    default = PruningConfig.model_fields
    return {
        "min_saving": min(default["min_saving"].default, target),
        "target_saving": target,
        "max_saving": max(default["max_saving"].default, min(1.0, target + 0.1)),
    }


def kept_within(scores: ArrayLike, tokens: Sequence[int], budget: float) -> tuple[int, ...]:
    """Positions of the chunks that stay, ascending.

    The lowest go until at most ``budget`` of the chunk tokens are left, as `PruningConfig` would have it: a chunk that
    would take more than the largest saving is passed over, and the least number of chunks stays.

    Args:
        scores: ``[k]``, low = removed first.
        tokens: ``[k]`` chunk lengths.
        budget: share of the chunk tokens.
    """
    lengths: NDArray[np.int64] = np.asarray(tokens, dtype=np.int64)
    settings, total = savings(budget), int(lengths.sum())
    most = floor(settings["max_saving"] * total + 1e-9)
    problem = RemovalProblem(
        masses=np.zeros((1, 1, len(lengths))),
        caps=np.ones((1, 1)),
        tokens=lengths,
        removable=np.ones(len(lengths), dtype=np.bool_),
        m0=PruningConfig.model_fields["m0"].default,
        target_tokens=min(ceil(settings["target_saving"] * total - 1e-9), most),
        max_tokens=most,
    )
    gone = set(greedy_removal(problem, np.asarray(scores, dtype=np.float64)).removed)
    return tuple(i for i in range(len(lengths)) if i not in gone)
