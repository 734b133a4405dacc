"""An audit that stops early: observers are looked at in batches until the outcome is certain.

Betting wealth may be looked at after every draw (:mod:`.betting`), so stopping at a moment chosen by what was seen
spends no more than the same ``level``. A bound for a fixed number of draws may not be used so: looked at every ten
draws it errs more often than it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.betting import best_log_wealth, log_growth, log_wealth_needed, mix
from entroprefill_rag.rule.bounds import Bounded, bounded_mean, masses_of


@dataclass(frozen=True)
class Sequential:
    """How a sequential audit ended.

    Attributes:
        drawn: observers looked at.
        stopped: ``"passed"``: every head passed; ``"hopeless"``: draws were left, but a head fails even if it loses
            nothing in them; ``"exhausted"``: nothing was left to look at before either.
        bounded: the betting bound on the losses seen.
    """

    drawn: int
    stopped: Literal["passed", "hopeless", "exhausted"]
    bounded: Bounded


def batch_slices(draws: int, first: int, growth: float = 1.5) -> Iterator[slice]:
    """Cut draws into batches that grow, so that an undecided audit costs few reads.

    Args:
        draws: the most observers looked at.
        first: size of the first batch; :func:`.bounds.smallest_m` is a good one, as nothing can pass before.
        growth: how many observers have been looked at after a batch, relative to before it.

    Raises:
        ConfigError: a count below one, or a growth of at most 1.
    """
    if draws < 1 or first < 1 or growth <= 1.0:
        raise ConfigError(f"batches need draws >= 1, first >= 1, growth > 1, got {draws}, {first} and {growth}")
    start, stop = 0, min(first, draws)
    while start < draws:
        yield slice(start, stop)
        start, stop = stop, min(draws, max(stop + 1, int(stop * growth)))


def sequential_mean(batches: Iterable[ArrayLike], *, eps: float, level: float, draws: int) -> Sequential:
    """Bound each head's mean loss, taking no more batches than it needs.

    Valid because the wealth of a bet is tested at all times at once (Ville's inequality; Waudby-Smith and Ramdas
    2024, section 4). The batches are read lazily: nothing is drawn after the outcome is certain.

    Args:
        batches: losses ``[H, b]`` of independent observers, in the order drawn.
        eps: largest mean accepted [eps_audit].
        level: probability that a head is accepted, at whatever moment, though its mean exceeds ``eps``.
        draws: the most observers that will be looked at, fixed beforehand.

    Raises:
        ConfigError: ``eps`` or ``level`` outside (0, 1), or ``draws`` below one.
        ValueError: no batch, more losses than ``draws``, or losses that are not masses.
    """
    if draws < 1 or not 0.0 < eps < 1.0 or not 0.0 < level < 1.0:
        raise ConfigError(f"need draws >= 1 and eps, level in (0, 1), got {draws}, {eps} and {level}")
    needed = log_wealth_needed(level)
    seen = []
    drawn = 0
    stopped: Literal["passed", "hopeless", "exhausted"] = "exhausted"
    stakes = peak = None
    for batch in batches:
        losses = masses_of(batch)
        seen.append(losses)
        drawn += losses.shape[1]
        if drawn > draws:
            raise ValueError(f"{drawn} losses were given, but only draws={draws} had been announced")
        growth = log_growth(losses, eps)
        if stakes is None or peak is None:
            stakes, peak = np.zeros_like(growth[:, 0]), np.zeros(len(losses))
        # Summed in one chain with what came before, so that batches give the very numbers of one look at the end.
        path = np.cumsum(np.concatenate([stakes[:, None], growth], axis=1), axis=1)[:, 1:]
        stakes, peak = path[:, -1], np.maximum(peak, mix(path).max(axis=1))
        shown = peak >= needed
        if shown.all() and bool((np.concatenate(seen, axis=1).mean(axis=1) <= eps).all()):
            stopped = "passed"
            break
        left = draws - drawn
        total = np.concatenate(seen, axis=1).sum(axis=1)
        poor = ~shown & (best_log_wealth(stakes, left, eps) < needed)
        if left and (poor | (total > eps * draws)).any():
            stopped = "hopeless"
            break
    if not seen:
        raise ValueError("a sequential audit needs at least one batch of losses, got none")
    return Sequential(drawn, stopped, bounded_mean(np.concatenate(seen, axis=1), eps, level, "betting"))
