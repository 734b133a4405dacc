"""Which chunks go: limits that hold, whatever chooses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from removal_cases import feasible_sets, problems, simple

import entroprefill_rag.rule.removal as removal_module
from entroprefill_rag.rule.removal import (
    effective_caps,
    exact_removal,
    greedy_removal,
    row_caps,
    within_reach,
)


def obeys(problem, removal):
    removed = list(removal.removed)
    assert (problem.masses[..., removed].sum(axis=-1) <= problem.caps).all()
    assert len(problem.tokens) - len(removed) >= problem.m0 or not removed
    assert problem.removable[removed].all()
    assert problem.tokens[removed].sum() == removal.tokens_saved <= problem.max_tokens
    assert (removal.stopped == "target") == (removal.tokens_saved >= problem.target_tokens)
    assert removed == sorted(set(removed))


@given(problems())
def test_greedy_never_breaks_a_cap_nor_m0_nor_the_largest_saving(case):
    problem, scores, _ = case
    obeys(problem, greedy_removal(problem, scores))


@given(problems())
def test_greedy_leaves_out_no_chunk_that_would_still_fit(case):
    problem, scores, _ = case
    removal = greedy_removal(problem, scores)
    if removal.stopped == "exhausted":
        for i in set(range(len(scores))) - set(removal.removed):
            more = sorted([*removal.removed, i])
            barely = replace(problem, caps=problem.caps - 1e-12)
            assert not barely.feasible(more)


@given(problems(), st.randoms())
def test_greedy_does_not_depend_on_the_order_of_the_chunks(case, random):
    problem, scores, _ = case
    order = list(range(len(scores)))
    random.shuffle(order)
    moved = replace(
        problem, masses=problem.masses[..., order], tokens=problem.tokens[order], removable=problem.removable[order]
    )
    again = greedy_removal(moved, scores[order])
    assert {order[i] for i in again.removed} == set(greedy_removal(problem, scores).removed)


def test_low_scores_go_first_and_the_target_stops_removal():
    problem = simple(masses=[[0.1, 0.1, 0.1, 0.1]], target=20)
    removal = greedy_removal(problem, np.array([3.0, 1.0, 2.0, 0.0]))
    assert removal.removed == (1, 3)
    assert removal.stopped == "target"
    assert removal.solver == "greedy"


def test_of_equal_scores_the_earlier_chunk_is_kept_longer():
    problem = simple(masses=[[0.1, 0.1, 0.1, 0.1]], target=20)
    assert greedy_removal(problem, np.zeros(4)).removed == (2, 3)


def test_a_chunk_that_does_not_fit_is_skipped_and_the_next_is_tried():
    problem = simple(masses=[[0.6, 0.2, 0.2]], caps=0.5)
    assert greedy_removal(problem, np.array([0.0, 1.0, 2.0])).removed == (1, 2)


def test_the_largest_saving_is_skipped_over_not_stopped_at():
    problem = simple(masses=[[0.1, 0.1, 0.1]], tokens=[90, 20, 10], most=40)
    assert greedy_removal(problem, np.array([0.0, 1.0, 2.0])).removed == (1, 2)


def test_a_sum_exactly_at_its_cap_fits():
    problem = simple(masses=[[0.25, 0.25, 0.5]], caps=0.5, m0=1)
    assert greedy_removal(problem, np.arange(3.0)).removed == (0, 1)


def test_protected_chunks_count_towards_m0():
    problem = simple(masses=[[0.1, 0.1, 0.1]], m0=2, removable=[False, True, True])
    assert problem.k_max == 1
    assert len(greedy_removal(problem, np.arange(3.0)).removed) == 1


@pytest.mark.parametrize("m0", [3, 7])
def test_nothing_goes_where_every_chunk_must_stay(m0):
    problem = simple(masses=[[0.1, 0.1, 0.1]], m0=m0)
    assert problem.k_max == 0
    assert greedy_removal(problem, np.arange(3.0)).removed == ()
    assert exact_removal(problem, np.arange(3.0), np.ones(3), seconds=5).removed == ()


def test_row_caps_count_from_the_end_of_the_prompt():
    np.testing.assert_allclose(row_caps((0.1, 0.2), 4), [0.2, 0.2, 0.2, 0.1])
    np.testing.assert_allclose(row_caps((0.1, 0.2, 0.3), 2), [0.2, 0.1])
    np.testing.assert_allclose(row_caps(0.3, 2), 0.3)


def test_a_cap_of_its_own_holds_for_its_row():
    problem = simple(masses=[[0.2, 0.05], [0.05, 0.2]], caps=np.array([[0.1, 0.3]]))
    assert greedy_removal(problem, np.arange(2.0)).removed == (1,)


def test_relative_caps_bind_eligible_heads_to_a_share_of_their_document_mass():
    masses = np.array([[[0.1, 0.3]], [[0.01, 0.03]], [[0.01, 0.03]]])
    caps = effective_caps(np.array([0.3]), masses, np.array([True, True, False]), 0.5)
    np.testing.assert_allclose(caps[:, 0], [0.2, 0.02, 0.3])
    np.testing.assert_allclose(effective_caps(np.array([0.3]), masses, np.ones(3, bool), None), 0.3)


def test_a_relative_cap_stops_a_layer_that_hardly_looks_at_documents_from_dropping_what_it_looks_at():
    masses = np.array([[[0.001, 0.019]]])
    problem = simple(masses=masses)
    assert greedy_removal(problem, np.array([1.0, 0.0])).removed == (1,)
    relative = replace(problem, caps=effective_caps(np.array([0.5]), masses, np.ones(1, bool), 0.5))
    assert greedy_removal(relative, np.array([1.0, 0.0])).removed == (0,)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_exact_set_obeys_every_limit_and_is_never_worse_than_greedy_at_the_same_target(case):
    problem, scores, pooled = case
    greedy, exact = greedy_removal(problem, scores), exact_removal(problem, scores, pooled, seconds=30)
    obeys(problem, exact)
    assert exact.tokens_saved >= min(greedy.tokens_saved, problem.target_tokens)
    if exact.tokens_saved < problem.target_tokens or greedy.stopped == "target":
        assert pooled[list(exact.removed)].sum() <= pooled[list(greedy.removed)].sum() + 1e-12


@settings(max_examples=40, deadline=None)
@given(problems(most=7))
def test_the_exact_set_has_the_least_pooled_mass_of_all_sets_that_reach_the_target(case):
    problem, scores, pooled = case
    goal = min(problem.target_tokens, problem.max_tokens)
    reaching = [d for d in feasible_sets(problem) if problem.saved(d) >= goal]
    exact = exact_removal(problem, scores, pooled, seconds=30)
    if reaching:
        assert exact.tokens_saved >= goal
        assert pooled[list(exact.removed)].sum() <= min(pooled[list(d)].sum() for d in reaching) + 1e-9
    else:
        assert exact.stopped == "exhausted" or problem.max_tokens < problem.target_tokens


@settings(max_examples=40, deadline=None)
@given(problems(most=7))
def test_for_study_the_most_tokens_can_be_saved(case):
    problem, scores, pooled = case
    exact = exact_removal(problem, scores, pooled, seconds=30, objective="tokens")
    obeys(problem, exact)
    assert exact.tokens_saved == max(problem.saved(d) for d in feasible_sets(problem))


def test_exact_beats_greedy_where_greedy_spends_its_cap_on_the_wrong_chunk():
    problem = simple(masses=[[0.3, 0.1, 0.1]], caps=0.35, tokens=[11, 10, 10], target=20)
    greedy = greedy_removal(problem, np.array([0.0, 1.0, 2.0]))
    exact = exact_removal(problem, np.array([0.0, 1.0, 2.0]), np.array([0.3, 0.1, 0.1]), seconds=30)
    assert greedy.removed == (0,)
    assert exact.removed == (1, 2)
    assert exact.solver == "exact"


def test_tiny_pooled_masses_are_told_apart():
    problem = simple(masses=[[1e-9, 2e-9, 1.5e-9, 0.9]], target=10)
    exact = exact_removal(problem, np.array([2.0, 0.0, 1.0, 3.0]), np.array([1e-9, 2e-9, 1.5e-9, 0.9]), seconds=30)
    assert exact.removed == (0,)


@pytest.mark.parametrize("excess", [1e-12, 1e-9, 1e-7, 4e-7])
def test_a_set_that_the_solver_accepts_within_its_tolerance_is_repaired(excess):
    # The two cheapest chunks break the cap by less than HiGHS can see.
    problem = simple(masses=[[0.15, 0.15 + excess, 0.1, 0.1]], caps=0.3, target=20)
    exact = exact_removal(problem, np.arange(4.0), np.array([0.01, 0.01, 0.2, 0.2]), seconds=30)
    obeys(problem, exact)
    assert exact.tokens_saved == 20
    assert exact.removed != (0, 1)
    assert exact.solver in ("exact", "exact (repaired)")


def test_where_the_target_is_out_of_reach_the_saving_of_greedy_is_the_target():
    problem = simple(masses=[[0.3, 0.2, 0.5]], caps=0.35, target=20)
    exact = exact_removal(problem, np.array([0.0, 1.0, 2.0]), np.array([0.3, 0.2, 0.5]), seconds=30)
    assert exact.removed == (1,)
    assert exact.stopped == "exhausted"
    assert exact.solver == "exact (target out of reach, saving of greedy)"


def test_without_time_the_set_is_the_one_of_greedy_and_says_so():
    rng = np.random.default_rng(0)
    problem = simple(masses=rng.dirichlet(np.ones(30), size=20), target=150)
    scores = rng.normal(size=30)
    exact = exact_removal(problem, scores, rng.random(30), seconds=0.0)
    assert exact.removed == greedy_removal(problem, scores).removed
    assert exact.solver == "greedy (exact: time limit)"


def test_a_set_that_breaks_a_cap_is_solved_again_under_tighter_caps_and_says_so(monkeypatch):
    class Answer:
        status = 0

        def __init__(self, x):
            self.x = np.array(x)

    answers = iter([Answer([1.0, 1.0, 0.0]), Answer([0.0, 1.0, 1.0])])
    monkeypatch.setattr(removal_module, "milp", lambda *args, **kwargs: next(answers))
    problem = simple(masses=[[0.3, 0.1, 0.1]], caps=0.35, tokens=[11, 10, 10], target=20)
    exact = exact_removal(problem, np.array([0.0, 1.0, 2.0]), np.array([0.3, 0.1, 0.1]), seconds=30)
    assert exact.removed == (1, 2)
    assert exact.solver == "exact (repaired)"


@pytest.mark.parametrize(
    ("incumbent", "removed", "solver"),
    [
        ([0.0, 1.0, 1.0], (1, 2), "exact (time limit)"),
        ([1.0, 1.0, 0.0], (0,), "greedy (exact: caps broken by rounding)"),
        (None, (0,), "greedy (exact: time limit)"),
    ],
)
def test_on_time_out_a_feasible_incumbent_is_used_else_the_set_of_greedy(monkeypatch, incumbent, removed, solver):
    class TimedOut:
        status = 1
        x = None if incumbent is None else np.array(incumbent)

    monkeypatch.setattr(removal_module, "milp", lambda *args, **kwargs: TimedOut())
    problem = simple(masses=[[0.3, 0.1, 0.1]], caps=0.35, tokens=[11, 10, 10], target=20)
    exact = exact_removal(problem, np.array([0.0, 1.0, 2.0]), np.array([0.3, 0.1, 0.1]), seconds=30)
    assert exact.removed == removed
    assert exact.solver == solver


def test_with_no_chunk_at_all_nothing_goes():
    problem = simple(masses=np.empty((1, 0)))
    assert greedy_removal(problem, np.empty(0)).removed == ()
    assert exact_removal(problem, np.empty(0), np.empty(0), seconds=1).removed == ()


@given(problems())
def test_within_reach_are_the_lowest_chunks_that_would_reach_the_target_without_caps(case):
    problem, scores, _ = case
    within = within_reach(problem, scores)
    assert not (within & ~problem.removable).any()
    free = replace(problem, caps=np.full_like(problem.caps, np.inf))
    assert set(np.flatnonzero(within)) == set(greedy_removal(free, scores).removed)
    held = greedy_removal(replace(problem, removable=within), scores)
    obeys(problem, held)
    assert set(held.removed) <= set(np.flatnonzero(within))


def test_what_a_cap_refuses_is_not_made_up_for_within_reach():
    problem = simple(masses=[[0.6, 0.2, 0.2, 0.0]], caps=0.5, target=20)
    scores = np.array([0.0, 1.0, 2.0, 3.0])
    assert greedy_removal(problem, scores).removed == (1, 2)
    within = within_reach(problem, scores)
    assert within.tolist() == [True, True, False, False]
    assert greedy_removal(replace(problem, removable=within), scores).removed == (1,)
