"""Removal problems small enough to try every set: drawn at random, or written by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from entroprefill_rag.rule.removal import RemovalProblem


@st.composite
def problems(draw, most=9):
    """A problem, its scores and its pooled masses; masses of a row sum to at most 1."""
    k = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    heads, rows = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    masses = rng.dirichlet(np.full(k + 1, draw(st.sampled_from([0.1, 1.0, 5.0]))), size=(heads, rows))[..., :k]
    tokens = rng.integers(1, 200, k)
    share = sorted(draw(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=2)))
    problem = RemovalProblem(
        masses=masses,
        caps=rng.uniform(0.0, 0.6, (heads, rows)),
        tokens=tokens,
        removable=rng.random(k) < 0.8,
        m0=draw(st.integers(1, 3)),
        target_tokens=int(np.ceil(share[0] * tokens.sum())),
        max_tokens=int(np.ceil(share[1] * tokens.sum())),
    )
    return problem, rng.normal(size=k), masses.mean(axis=(0, 1))


def feasible_sets(problem):
    chunks = range(len(problem.tokens))
    return [d for size in range(len(chunks) + 1) for d in combinations(chunks, size) if problem.feasible(d)]


def simple(caps=0.5, *, masses, tokens=None, m0=1, target=10**6, most=10**6, removable=None):
    masses = np.asarray(masses, dtype=np.float64)
    k = masses.shape[-1]
    masses = masses.reshape(1, masses.shape[-2], k)
    return RemovalProblem(
        masses=masses,
        caps=np.broadcast_to(caps, masses.shape[:2]).astype(np.float64),
        tokens=np.full(k, 10) if tokens is None else np.asarray(tokens),
        removable=np.ones(k, bool) if removable is None else np.asarray(removable),
        m0=m0,
        target_tokens=target,
        max_tokens=most,
    )
