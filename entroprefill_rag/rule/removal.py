"""Which chunks go (section 5): greedy under hard caps, or the exact 0/1 programme."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

Floats = NDArray[np.float64]

# HiGHS accepts points that break a constraint by 1e-6: a chosen set is always judged again in float64.
_SOLVER_TOLERANCE = 1e-6


@dataclass(frozen=True)
class RemovalProblem:
    """What may be removed, and the limits on it.

    Attributes:
        masses: ``[H_Q, W_p, k]`` masses ``m[h, a, i]`` of the proposal rows.
        caps: ``[H_Q, W_p]`` largest discarded mass of every head and row.
        tokens: ``[k]`` chunk lengths ``n_i``.
        removable: ``[k]``.
        m0: chunks that must stay, protected ones included.
        target_tokens: removal stops when this many are saved.
        max_tokens: never exceeded.
    """

    masses: Floats
    caps: Floats
    tokens: NDArray[np.int64]
    removable: NDArray[np.bool_]
    m0: int
    target_tokens: int
    max_tokens: int

    @property
    def k_max(self) -> int:
        """``K``: the most chunks that may go."""
        return max(0, min(int(self.removable.sum()), len(self.tokens) - self.m0))

    @cached_property
    def by_chunk(self) -> Floats:
        """``[k, H_Q * W_p]`` masses, chunk by chunk."""
        return np.ascontiguousarray(self.masses.reshape(self.caps.size, len(self.tokens)).T)

    @cached_property
    def cap_per_row(self) -> Floats:
        """``[H_Q * W_p]`` caps."""
        return np.ascontiguousarray(self.caps.reshape(-1))

    def saved(self, removed: Iterable[int]) -> int:
        """Tokens saved by a removed set."""
        return int(self.tokens[list(removed)].sum())

    def discarded(self, removed: Sequence[int]) -> Floats:
        """``[H_Q, W_p]`` discarded mass ``d[h, a](D)``."""
        return np.asarray(self.masses[..., list(removed)].sum(axis=-1))

    def feasible(self, removed: Sequence[int]) -> bool:
        """Whether a set obeys every limit, in float64 and with no tolerance."""
        return (
            len(removed) <= self.k_max
            and bool(self.removable[list(removed)].all())
            and self.saved(removed) <= self.max_tokens
            and bool((self.discarded(removed) <= self.caps).all())
        )


@dataclass(frozen=True)
class Removal:
    """A removed set: chunk positions ascending, why removal stopped, what chose it."""

    removed: tuple[int, ...]
    stopped: Literal["target", "exhausted"]
    solver: str
    tokens_saved: int


def row_caps(eps_row: float | Sequence[float], rows: int) -> Floats:
    """One cap per proposal row: the given ones count from the end of the prompt, the last given holds for the rest.

    Returns:
        ``[rows]`` in the order of the rows' positions.
    """
    given = [eps_row] if isinstance(eps_row, (int, float)) else list(eps_row)
    return np.array([given[min(i, len(given) - 1)] for i in range(rows)][::-1], dtype=np.float64)


def effective_caps(caps: Floats, masses: Floats, eligible: NDArray[np.bool_], rho: float | None) -> Floats:
    """Caps ``[H_Q, W_p]``; for eligible heads also at most ``rho`` times the row's own document mass.

    A layer that hardly looks at the documents would pass absolute caps whatever is removed; a relative one it may not.

    Args:
        caps: ``[W_p]`` absolute caps.
        masses: ``[H_Q, W_p, k]``.
        eligible: ``[H_Q]``.
        rho: relative cap in (0, 1], or None.
    """
    full = np.broadcast_to(caps, masses.shape[:2]).copy()
    if rho is not None:
        full[eligible] = np.minimum(full[eligible], rho * masses[eligible].sum(axis=-1))
    return full


def within_reach(problem: RemovalProblem, scores: Floats) -> NDArray[np.bool_]:
    """``[k]`` the removable chunks that would go if no row had a cap: the lowest-ranking ones up to the target.

    With caps, greedy makes up for a low chunk that does not fit by one that ranks higher, and so removes what the
    order says to keep. Held to this set it removes less instead (``reach="target"``).

    Args:
        problem: what may go and the limits.
        scores: ``[k]``.
    """
    uncapped = replace(problem, caps=np.full_like(problem.caps, np.inf))
    within = np.zeros(len(problem.tokens), dtype=np.bool_)
    within[list(greedy_removal(uncapped, scores).removed)] = True
    return within


def _result(problem: RemovalProblem, removed: Iterable[int], solver: str) -> Removal:
    chosen = tuple(sorted(int(i) for i in removed))
    saved = problem.saved(chosen)
    return Removal(chosen, "target" if saved >= problem.target_tokens else "exhausted", solver, saved)


def greedy_removal(problem: RemovalProblem, scores: Floats) -> Removal:
    """Try removable chunks by ascending score; a chunk that breaks a limit is skipped, the target stops the search.

    Of chunks with equal scores the earlier is kept longer. Cost ``O(k log k + k * H_Q * W_p)``.

    Args:
        problem: what may go and the limits.
        scores: ``[k]``.
    """
    removed: list[int] = []
    discarded, saved = np.zeros_like(problem.cap_per_row), 0
    for i in np.lexsort((-np.arange(len(scores)), scores)).tolist():
        if saved >= problem.target_tokens or len(removed) >= problem.k_max:
            break
        if not problem.removable[i] or saved + int(problem.tokens[i]) > problem.max_tokens:
            continue
        trial = discarded + problem.by_chunk[i]
        if (trial <= problem.cap_per_row).all():
            discarded, saved = trial, saved + int(problem.tokens[i])
            removed.append(i)
    # Summed in order of position the last bit may differ, and the caps hold without a tolerance.
    while removed and not problem.feasible(sorted(removed)):
        removed.pop()
    return _result(problem, removed, "greedy")


def exact_removal(
    problem: RemovalProblem,
    scores: Floats,
    pooled: Floats,
    *,
    seconds: float,
    objective: Literal["pooled_mass", "tokens"] = "pooled_mass",
) -> Removal:
    """Remove the least pooled mass ``sum x_i A_i`` that saves the target, by mixed-integer programming.

    Where no set reaches the target, what greedy saves becomes the target. The set is never worse in pooled mass than
    greedy's at the same target, and always judged in float64: one that breaks a cap is solved again under tighter caps,
    else greedy's is used. ``solver`` of the result says which of these happened. Where a time limit struck, the choice
    need not be reproducible.

    Args:
        problem: what may go and the limits.
        scores: ``[k]``, for greedy.
        pooled: ``[k]`` pooled chunk masses ``A``.
        seconds: time limit of all solves together.
        objective: ``"tokens"`` saves the most tokens instead, up to ``max_tokens``; for study only, since without a
            stop the chunk that matters most goes whenever the caps allow it.
    """
    greedy = greedy_removal(problem, scores)
    if not problem.k_max:
        return greedy
    deadline = time.monotonic() + seconds
    goal, note, cost = min(problem.target_tokens, problem.max_tokens), "", pooled
    if objective == "tokens":
        goal, note, cost = 0, "most tokens", -problem.tokens.astype(np.float64)
    chosen, status = _solve(problem, cost, goal, deadline)
    if chosen is None and status == "infeasible" and greedy.removed:
        goal, note = greedy.tokens_saved, "target out of reach, saving of greedy"
        chosen, status = _solve(problem, cost, goal, deadline)
    if chosen is None:
        return Removal(greedy.removed, greedy.stopped, f"greedy (exact: {status})", greedy.tokens_saved)
    if greedy.tokens_saved >= goal and cost[list(greedy.removed)].sum() < cost[chosen].sum():
        return Removal(greedy.removed, greedy.stopped, f"greedy (exact no better; {status})", greedy.tokens_saved)
    details = "; ".join(part for part in (note, status if status != "optimal" else "") if part)
    return _result(problem, chosen, f"exact ({details})" if details else "exact")


def _solve(problem: RemovalProblem, cost: Floats, goal: int, deadline: float) -> tuple[list[int] | None, str]:
    """The cheapest feasible set that saves ``goal`` tokens, or None, and how the search ended."""
    fits_alone = problem.removable & (problem.by_chunk <= problem.cap_per_row).all(axis=1)
    chunks = np.flatnonzero(fits_alone)
    tokens = problem.tokens[chunks].astype(np.float64)
    if not len(chunks) or tokens.sum() < goal:
        return None, "infeasible"
    rows = np.flatnonzero(problem.by_chunk[chunks].sum(axis=0) > problem.cap_per_row)
    # In units of its cap, so that the solver's absolute tolerance means the same for every row.
    usage = (problem.by_chunk[np.ix_(chunks, rows)] / problem.cap_per_row[rows]).T
    # HiGHS stops at an absolute gap of 1e-6, coarse against masses of 1e-4.
    scaled = cost[chunks] * (1e4 / max(float(np.abs(cost[chunks]).max()), 1e-300))
    status = "no answer"
    for tighten in (0.0, 2 * _SOLVER_TOLERANCE):
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return None, "time limit"
        constraints = [
            LinearConstraint(np.ones((1, len(chunks))), ub=problem.k_max),
            LinearConstraint(tokens[None], lb=goal, ub=problem.max_tokens),
        ]
        if len(rows):
            constraints.append(LinearConstraint(usage, ub=1.0 - tighten))
        answer = milp(
            scaled,
            integrality=np.ones(len(chunks)),
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        status = {0: "optimal", 1: "time limit", 2: "infeasible"}.get(answer.status, "no answer")
        if answer.x is None:
            break
        chosen = chunks[np.round(answer.x) > 0].tolist()
        if problem.feasible(chosen) and problem.saved(chosen) >= goal:
            repaired = "repaired" if tighten else ""
            return chosen, "; ".join(filter(None, (repaired, status if status != "optimal" else ""))) or "optimal"
        status = "caps broken by rounding"
    return None, status
