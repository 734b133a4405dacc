"""The dual bound on what any removal could save."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from removal_cases import feasible_sets, problems, simple

import entroprefill_rag.rule.dual as dual_module
from entroprefill_rag.rule.dual import dual_bound, dual_value, priced_masses


def most_tokens(problem):
    """Brute force over all sets; the bound knows neither target nor largest saving."""
    free = replace(problem, max_tokens=int(problem.tokens.sum()))
    return max(free.saved(d) for d in feasible_sets(free))


@settings(max_examples=80, deadline=None)
@given(problems())
def test_the_bound_is_never_below_the_best_set(case):
    problem, _, _ = case
    bound = dual_bound(problem, 0, seconds=30)
    assert bound.bound >= most_tokens(problem)
    assert bound.gap == bound.bound


@settings(max_examples=20, deadline=None)
@given(problems(most=12))
def test_the_bound_holds_for_larger_problems_too(case):
    problem, _, _ = case
    assert dual_bound(problem, 0, seconds=30).bound >= most_tokens(problem)


@given(problems(most=6), st.integers(0, 2**32 - 1), st.floats(0.0, 100.0))
def test_any_nonnegative_prices_give_a_bound(case, seed, t):
    problem, _, _ = case
    rng = np.random.default_rng(seed)
    heads, rows = problem.caps.shape
    prices = [(h, a, float(rng.exponential(100))) for h in range(heads) for a in range(rows) if rng.random() < 0.5]
    cap_cost, chunk_cost = priced_masses(problem, prices)
    value = dual_value(cap_cost, chunk_cost, t, problem.tokens, problem.removable, problem.k_max)
    assert value >= most_tokens(problem)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_the_bound_follows_from_the_numbers_recorded(case):
    problem, _, _ = case
    dual = dual_bound(problem, 0, seconds=30)
    assert all(price > 0 for _, _, price in dual.prices)
    cap_cost, chunk_cost = priced_masses(problem, dual.prices)
    assert dual.cap_cost == pytest.approx(cap_cost)
    assert dual.chunk_cost == pytest.approx(chunk_cost)
    again = dual_value(dual.cap_cost, dual.chunk_cost, dual.t, problem.tokens, problem.removable, dual.k_max)
    assert dual.bound == again


def test_the_bound_proves_a_budget_infeasible():
    problem = simple(masses=[[0.3, 0.3, 0.3]], caps=0.25, target=10)
    assert dual_bound(problem, 0, seconds=30).bound < 30
    tight = simple(masses=[[0.5, 0.5]], caps=0.5)
    assert dual_bound(tight, 10, seconds=30).bound == 10
    assert dual_bound(tight, 10, seconds=30).gap == 0


def test_without_binding_caps_the_bound_is_the_length_of_the_longest_chunks_that_may_go():
    problem = simple(masses=[[0.1, 0.1, 0.1, 0.1]], caps=0.9, tokens=[5, 50, 20, 70], m0=2)
    dual = dual_bound(problem, 0, seconds=30)
    assert dual.bound == 120
    assert dual.k_max == 2
    assert dual.prices == ()


def test_where_nothing_may_go_the_bound_is_zero():
    assert dual_bound(simple(masses=[[0.1, 0.1]], m0=2), 0, seconds=30).bound == 0
    assert dual_bound(simple(masses=[[0.1, 0.1]], removable=[False, False]), 0, seconds=30).bound == 0


def test_a_solver_without_an_answer_still_leaves_a_bound(monkeypatch):
    class NoAnswer:
        x = None

    monkeypatch.setattr(dual_module, "linprog", lambda *args, **kwargs: NoAnswer())
    problem = simple(masses=[[0.4, 0.4, 0.4]], caps=0.5, tokens=[5, 50, 20], m0=2)
    dual = dual_bound(problem, 50, seconds=30)
    assert dual.bound == 50
    assert dual.gap == 0


def test_rounding_never_pushes_the_bound_below_a_whole_number_of_tokens():
    assert dual_value(299.9999999, [0.0], 10.0, [10], [True], 0) == 300
    assert dual_value(299.9, [0.0], 10.0, [10], [True], 0) == 299
