"""The bet is fair against its claim, predictable, and its inversion is exact."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from entroprefill_rag.rule.betting import (
    LOG_PRIOR,
    STAKES,
    best_log_wealth,
    log_growth,
    log_wealth_needed,
    log_wealth_path,
    upper_mean,
)

masses = st.floats(0.0, 1.0)
limits = st.floats(0.01, 0.95)


def wealth_of_predictable_bet(losses: list[float], eps: float) -> list[float]:
    """prod(1 - lambda_t (X_t - eps)), lambda_t fixed before X_t is seen: stakes weighed by their own wealth so far."""
    own = np.exp(LOG_PRIOR)
    wealth, path = 1.0, []
    for loss in losses:
        stake = float((own * STAKES).sum() / own.sum()) / (1 - eps)
        assert 0 <= stake <= 1 / (1 - eps) * (1 + 1e-12)
        wealth *= 1 - stake * (loss - eps)
        own = own * (1 - STAKES / (1 - eps) * (loss - eps))
        path.append(wealth)
    return path


@given(losses=st.lists(masses, min_size=1, max_size=40), eps=limits)
def test_the_mixture_is_the_predictable_bet_of_the_paper(losses: list[float], eps: float) -> None:
    path = np.exp(log_wealth_path(np.array([losses]), eps))[0]
    assert path == pytest.approx(wealth_of_predictable_bet(losses, eps), rel=1e-9, abs=1e-12)


def test_the_prior_is_a_distribution_over_stakes_that_cannot_go_broke() -> None:
    assert math.fsum(np.exp(LOG_PRIOR)) == pytest.approx(1.0, abs=1e-15)
    assert STAKES.max() <= 1
    assert STAKES.min() > 0
    assert (STAKES < 1).any()


@given(eps=limits, rest=st.lists(masses, max_size=10))
def test_one_bet_is_fair_at_the_claimed_mean(eps: float, rest: list[float]) -> None:
    """For a loss of 0 or 1 with mean eps the expected wealth does not change, whatever came before."""
    zero, one = (np.exp(log_wealth_path(np.array([[*rest, last]]), eps))[0] for last in (0.0, 1.0))
    before = zero[-2] if rest else 1.0
    assert (1 - eps) * zero[-1] + eps * one[-1] == pytest.approx(before, rel=1e-9)


@given(losses=st.lists(masses, min_size=2, max_size=30), eps=limits, seed=st.integers(0, 99))
def test_the_final_wealth_does_not_depend_on_the_order(losses: list[float], eps: float, seed: int) -> None:
    shuffled = np.random.default_rng(seed).permutation(losses)
    first, second = (log_wealth_path(np.array([values]), eps)[0, -1] for values in (losses, shuffled))
    assert first == pytest.approx(second, abs=1e-9)


@given(losses=st.lists(masses, min_size=1, max_size=30), eps=limits, more=masses)
def test_wealth_grows_with_the_claim_at_every_draw(losses: list[float], eps: float, more: float) -> None:
    larger = eps + more * (0.99 - eps)
    low, high = (log_wealth_path(np.array([losses]), claim) for claim in (eps, larger))
    assert (high >= low - 1e-9).all()


def test_a_loss_of_one_ruins_the_full_stake_only() -> None:
    growth = log_growth(np.ones(1), 0.2)[0]
    assert growth[0] == -np.inf
    assert np.isfinite(growth[1:]).all()
    assert np.isfinite(log_wealth_path(np.ones((1, 300)), 0.2)).all()


@given(losses=st.lists(masses, min_size=1, max_size=10), future=st.lists(masses, min_size=1, max_size=10), eps=limits)
def test_no_future_beats_losing_nothing_more(losses: list[float], future: list[float], eps: float) -> None:
    stakes = log_growth(np.array(losses), eps).sum(axis=0)
    best = best_log_wealth(stakes, len(future), eps)
    assert best >= log_wealth_path(np.array([losses + future]), eps)[0, len(losses) :].max() - 1e-9
    assert best == pytest.approx(log_wealth_path(np.array([losses + [0.0] * len(future)]), eps)[0, -1], abs=1e-9)


@pytest.mark.parametrize("m", [1, 5, 31, 32, 33, 200])
def test_the_upper_bound_is_where_the_final_wealth_meets_the_level(m: int) -> None:
    losses = np.random.default_rng(m).beta(1, 6, (5, m))
    level = 1e-2
    for head, upper in enumerate(upper_mean(losses, level)):
        at = log_wealth_path(losses[head : head + 1], min(upper, 1 - 1e-12))[0, -1]
        below = log_wealth_path(losses[head : head + 1], upper - 2**-15)[0, -1]
        assert at >= math.log(1 / level) - 1e-6
        assert below < math.log(1 / level)


def test_with_constant_losses_it_comes_near_what_no_valid_test_beats() -> None:
    """Losses of c, or of 1 with just the chance that makes the mean eps, look alike until the first 1.

    So m losses of c can refute a mean above eps only if ((1 - eps) / (1 - c))^m <= level.
    """
    c, eps, level = 0.05, 0.15, 1e-3
    least = math.ceil(math.log(1 / level) / math.log((1 - c) / (1 - eps)))
    path = log_wealth_path(np.full((1, 300), c), eps)[0]
    needed = int(np.argmax(path >= log_wealth_needed(level))) + 1
    assert least <= needed <= least + 3


# --- validity, exactly ----------------------------------------------------------------------------------------------

Wealth = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


def probability_of_ever_accepting(wealth: Wealth, m: int, eps: float, level: float) -> float:
    """Exact, for Bernoulli(eps) losses and a log wealth that depends on the draws and the ones among them."""
    alive = np.zeros(m + 2)
    alive[0] = 1.0
    accepted = 0.0
    ones = np.arange(m + 2.0)
    for draws in range(1, m + 1):
        alive = alive * (1 - eps) + np.concatenate([[0.0], alive[:-1]]) * eps
        reached = (ones <= draws) & (wealth(np.float64(draws) - ones, ones) >= log_wealth_needed(level))
        accepted += float(alive[reached].sum())
        alive[reached] = 0.0
    return accepted


def stakes_after(zeros: NDArray[np.float64], ones: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    """Each stake's own log wealth, from the formula: [..., stakes]."""
    bets = STAKES / (1 - eps)
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = np.where(ones[:, None] > 0, ones[:, None] * np.log(np.maximum(1 - bets * (1 - eps), 0)), 0.0)
    return np.asarray(zeros[:, None] * np.log(1 + bets * eps) + lost)


def mixture(eps: float) -> Wealth:
    return lambda zeros, ones: np.log(np.exp(stakes_after(zeros, ones, eps) + LOG_PRIOR).sum(axis=1))


def best_in_hindsight(eps: float) -> Wealth:
    return lambda zeros, ones: stakes_after(zeros, ones, eps).max(axis=1)


CASES = [(m, eps, level) for m in (30, 150) for eps in (0.05, 0.2, 0.5) for level in (0.1, 0.01)]


@pytest.mark.parametrize(("m", "eps", "level"), CASES)
def test_looked_at_after_every_draw_it_errs_no_more_than_level(m: int, eps: float, level: float) -> None:
    error = probability_of_ever_accepting(mixture(eps), m, eps, level)
    assert error <= level
    if m == 150:
        assert error > 0.1 * level, "the exact test must not be idle"


def test_the_exact_test_runs_the_wealth_of_the_code() -> None:
    losses = (np.random.default_rng(1).random(60) < 0.2) * 1.0
    ones = losses.cumsum()
    assert mixture(0.2)(np.arange(1, 61) - ones, ones) == pytest.approx(log_wealth_path(losses[None], 0.2)[0], abs=1e-9)


def test_a_bet_chosen_in_hindsight_fails_the_exact_test() -> None:
    assert any(probability_of_ever_accepting(best_in_hindsight(case[1]), *case) > case[2] for case in CASES)
