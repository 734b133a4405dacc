"""The dual bound (section 5): no feasible set can save more tokens than this.

It can prove that a budget is out of reach; it can never prove that one is within it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from entroprefill_rag.record import DualBound
from entroprefill_rag.rule.removal import RemovalProblem

Floats = NDArray[np.float64]
Prices = Sequence[tuple[int, int, float]]


def priced_masses(problem: RemovalProblem, prices: Prices) -> tuple[float, Floats]:
    """What prices ``y`` charge: ``sum y * eps_row`` and ``[k]`` per chunk ``sum y * m``."""
    cap_cost, chunk_cost = 0.0, np.zeros(len(problem.tokens))
    for head, row, price in prices:
        cap_cost += price * float(problem.caps[head, row])
        chunk_cost += price * problem.masses[head, row]
    return cap_cost, chunk_cost


def dual_value(
    cap_cost: float,
    chunk_cost: Sequence[float] | Floats,
    t: float,
    tokens: Sequence[int] | NDArray[np.int64],
    removable: Sequence[bool] | NDArray[np.bool_],
    k_max: int,
) -> int:
    """Upper bound on the tokens any feasible set can save, from given prices.

    ``U(y, t) = sum y * eps_row + t * K + sum_{i removable} max(0, n_i - sum y * m[., ., i] - t)``, floored because
    tokens are whole (1e-6 is added first: rounding must not push the bound below the truth).

    Args:
        cap_cost: ``sum y * eps_row``.
        chunk_cost: ``[k]`` ``sum y * m`` per chunk.
        t: price of one more removed chunk.
        tokens: ``[k]``.
        removable: ``[k]``.
        k_max: ``K``.
    """
    worth = np.asarray(tokens, dtype=np.float64) - np.asarray(chunk_cost, dtype=np.float64) - t
    value = cap_cost + t * k_max + np.maximum(worth[np.asarray(removable, dtype=bool)], 0.0).sum()
    return int(np.floor(value + 1e-6))


def dual_bound(problem: RemovalProblem, tokens_saved: int, *, seconds: float) -> DualBound:
    """The bound at the prices of the linear relaxation, or at simple prices where these are better or time runs out.

    Args:
        problem: what may go and the limits; ``target_tokens`` and ``max_tokens`` play no part.
        tokens_saved: by the set at hand, for the gap.
        seconds: time limit.
    """
    chunks = np.flatnonzero(problem.removable)
    lengths = np.sort(problem.tokens[chunks])[::-1]
    # At these prices the bound is the length of the K longest chunks.
    candidates: list[tuple[Prices, float]] = [
        ([], float(lengths[min(problem.k_max, len(lengths) - 1)]) if len(lengths) else 0.0)
    ]
    rows = np.flatnonzero(problem.by_chunk[chunks].sum(axis=0) > problem.cap_per_row)
    if problem.k_max and len(rows):
        usage = problem.by_chunk[np.ix_(chunks, rows)].T
        answer = linprog(
            -problem.tokens[chunks].astype(np.float64),
            A_ub=np.vstack([usage, np.ones(len(chunks))]),
            b_ub=np.append(problem.cap_per_row[rows], problem.k_max),
            bounds=(0, 1),
            method="highs",
            options={"time_limit": seconds},
        )
        marginals = None if answer.x is None else np.maximum(0.0, -np.asarray(answer.ineqlin.marginals))
        if marginals is not None and np.isfinite(marginals).all():
            width = problem.caps.shape[1]
            prices = [
                (int(row) // width, int(row) % width, _digits(price))
                for row, price in zip(rows, marginals[:-1], strict=True)
                if price > 0
            ]
            candidates.append((prices, _digits(marginals[-1])))
    return min((_bound_at(problem, *prices, tokens_saved) for prices in candidates), key=lambda dual: dual.bound)


def _bound_at(problem: RemovalProblem, prices: Prices, t: float, tokens_saved: int) -> DualBound:
    cap_cost, chunk_cost = priced_masses(problem, prices)
    # The bound is taken at the numbers as recorded: whoever recomputes it from the record gets the same.
    cap_cost, costs = _digits(cap_cost), tuple(_digits(cost) for cost in chunk_cost)
    bound = dual_value(cap_cost, costs, t, problem.tokens, problem.removable, problem.k_max)
    return DualBound(
        bound=bound,
        gap=bound - tokens_saved,
        t=t,
        k_max=problem.k_max,
        prices=tuple(prices),
        cap_cost=cap_cost,
        chunk_cost=costs,
    )


def _digits(value: float) -> float:
    return float(f"{value:.12g}")
