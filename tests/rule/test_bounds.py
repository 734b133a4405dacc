"""Every bound is what its paper says, errs no more often than it says, and is exact at the edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.bounds import BOUNDS, bounded_mean, exact_mean, recheck, smallest_m, statements
from entroprefill_rag.rule.concentration import hoeffding_upper, kl_upper

Floats = NDArray[np.float64]
Verdict = Callable[[Floats, float, float], NDArray[np.bool_]]

J, H, DELTA = 8, 9, 0.05


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2024)


# --- formulas, against implementations written from the papers ------------------------------------------------------


def hoeffding_by_hand(losses: Floats, level: float) -> float:
    return float(losses.mean()) + math.sqrt(math.log(1 / level) / (2 * len(losses)))


def kl_by_hand(losses: Floats, level: float) -> float:
    p, m = float(losses.mean()), len(losses)

    def excess(q: float) -> float:
        divergence = 0.0 if p == 0 else p * math.log(p / q)
        divergence += 0.0 if p == 1 else (1 - p) * math.log((1 - p) / (1 - q))
        return m * divergence - math.log(1 / level)

    top = 1 - 1e-13
    return 1.0 if excess(top) < 0 else float(brentq(excess, max(p, 1e-300), top, xtol=1e-14))


def empirical_bernstein_by_hand(losses: Floats, level: float) -> float:
    m = len(losses)
    pairs = sum((losses[i] - losses[j]) ** 2 for i in range(m) for j in range(i))
    variance = pairs / (m * (m - 1))
    return float(
        losses.mean() + math.sqrt(2 * variance * math.log(2 / level) / m) + 7 * math.log(2 / level) / (3 * (m - 1))
    )


@pytest.mark.parametrize(
    ("bound", "by_hand"),
    [
        ("hoeffding", hoeffding_by_hand),
        ("kl", kl_by_hand),
        ("empirical_bernstein", empirical_bernstein_by_hand),
    ],
)
@pytest.mark.parametrize("m", [2, 17, 200])
def test_closed_forms_are_those_of_their_papers(
    bound: str, by_hand: Callable[[Floats, float], float], m: int, rng: np.random.Generator
) -> None:
    losses = np.concatenate([rng.beta(1, 12, (6, m)), (rng.random((2, m)) < 0.3) * 1.0, np.zeros((1, m))])
    upper = bounded_mean(losses, 0.2, 1e-3, bound).upper
    for head, values in enumerate(losses):
        assert upper[head] == pytest.approx(min(1.0, by_hand(values, 1e-3)), abs=1e-8)


@pytest.mark.parametrize(
    ("bound", "layers_and_heads", "layers"),
    [("hoeffding", 364, 254), ("kl", 70, 49), ("empirical_bernstein", 187, 136), ("betting", 71, 50)],
)
def test_smallest_m_is_the_published_one(bound: str, layers_and_heads: int, layers: int) -> None:
    assert smallest_m(bound, 0.1, DELTA / statements("layers_and_heads", J, H)) == layers_and_heads
    assert smallest_m(bound, 0.1, DELTA / statements("layers", J, H)) == layers


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("eps", "level"), [(0.05, 1e-4), (0.1, DELTA / 72), (0.3, 0.05), (0.9, 0.5), (0.999, 0.9)])
def test_smallest_m_is_where_zero_losses_begin_to_pass(bound: str, eps: float, level: float) -> None:
    m = smallest_m(bound, eps, level)
    assert bounded_mean(np.zeros((2, m)), eps, level, bound).passed.all()
    if m > (2 if bound == "empirical_bernstein" else 1):
        assert not bounded_mean(np.zeros((2, m - 1)), eps, level, bound).passed.any()


def test_the_union_bound_counts_layers_and_heads_or_layers() -> None:
    assert statements("layers_and_heads", 8, 9) == 72
    assert statements("layers", 8, 9) == 8
    with pytest.raises(ConfigError, match="heads"):
        statements("heads", 8, 9)
    with pytest.raises(ConfigError, match="at least one"):
        statements("layers", 0, 9)


# --- validity -------------------------------------------------------------------------------------------------------


def by(bound: str) -> Verdict:
    return lambda losses, eps, level: bounded_mean(losses, eps, level, bound).passed


def probability_of_false_acceptance(verdict: Verdict, m: int, eps: float, level: float) -> float:
    """Exact, for m Bernoulli(eps) losses and a verdict that depends on how many there are."""
    ones = np.arange(m + 1)
    losses = (np.arange(m) < ones[:, None]) * 1.0
    return float(binom.pmf(ones, m, eps)[verdict(losses, eps, level)].sum())


CASES = [(m, eps, level) for m in (10, 60, 150) for eps in (0.05, 0.2, 0.5) for level in (0.1, 0.01)]
SYMMETRIC = [bound for bound in BOUNDS if bound != "betting"]


@pytest.mark.parametrize("bound", SYMMETRIC)
@pytest.mark.parametrize(("m", "eps", "level"), CASES)
def test_one_head_at_eps_is_accepted_no_more_often_than_level(bound: str, m: int, eps: float, level: float) -> None:
    assert probability_of_false_acceptance(by(bound), m, eps, level) <= level


def test_the_exact_test_is_not_idle() -> None:
    """KL comes near its level somewhere, so a bound that is a little too short cannot hide."""
    worst = max(probability_of_false_acceptance(by("kl"), *case) / case[2] for case in CASES)
    assert 0.2 < worst <= 1.0


def no_margin(losses: Floats, eps: float, level: float) -> NDArray[np.bool_]:
    return np.asarray(losses.mean(axis=1) <= eps)


def half_of_hoeffding(losses: Floats, eps: float, level: float) -> NDArray[np.bool_]:
    return np.asarray(losses.mean(axis=1) + 0.5 * math.sqrt(math.log(1 / level) / (2 * losses.shape[1])) <= eps)


def union_forgotten(losses: Floats, eps: float, level: float) -> NDArray[np.bool_]:
    return bounded_mean(losses, eps, min(0.99, 9 * level), "kl").passed


@pytest.mark.parametrize("broken", [no_margin, half_of_hoeffding, union_forgotten])
def test_a_broken_bound_fails_the_exact_test(broken: Verdict) -> None:
    assert any(probability_of_false_acceptance(broken, *case) > case[2] for case in CASES)


def at_mean(eps: float) -> dict[str, Callable[[np.random.Generator, int, int], Floats]]:
    """Losses whose mean is exactly eps."""
    return {
        "bernoulli": lambda rng, n, m: (rng.random((n, m)) < eps) * 1.0,
        "beta": lambda rng, n, m: rng.beta(eps, 1 - eps, (n, m)),
        "beta, low variance": lambda rng, n, m: rng.beta(60 * eps, 60 * (1 - eps), (n, m)),
        "two points": lambda rng, n, m: np.where(rng.random((n, m)) < 0.5, 0.5 * eps, 1.5 * eps),
        "rare and large": lambda rng, n, m: np.where(rng.random((n, m)) < 0.02, 0.4, 0.0) + eps - 0.02 * 0.4,
        "half the rows removed": lambda rng, n, m: (rng.random((n, m)) < 0.5) * rng.beta(1, 0.5 / eps - 1, (n, m)),
    }


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("law", list(at_mean(0.2)))
@pytest.mark.parametrize("m", [40, 120])
def test_false_acceptances_in_simulation_stay_below_level(bound: str, law: str, m: int) -> None:
    eps, level, runs = 0.2, 0.05, 2000
    losses = at_mean(eps)[law](np.random.default_rng(m), runs, m)
    assert abs(losses.mean() - eps) < 6 * losses.std() / math.sqrt(losses.size) + 1e-9, "the mean is not eps"

    result = bounded_mean(losses, eps, level, bound)

    # One-sided binomial error bar: exceeded by chance once in 10,000 if the bound erred at exactly its level.
    allowed = binom.ppf(1 - 1e-4, runs, level)
    assert result.passed.sum() <= allowed
    assert (result.upper < eps).sum() <= allowed


@pytest.mark.parametrize("law", list(at_mean(0.2)))
def test_the_simulation_catches_a_bound_without_margin(law: str) -> None:
    losses = at_mean(0.2)[law](np.random.default_rng(3), 2000, 120)
    assert no_margin(losses, 0.2, 0.05).sum() > binom.ppf(1 - 1e-4, 2000, 0.05)


@pytest.mark.parametrize("bound", BOUNDS)
def test_upper_bounds_cover_the_mean_wherever_it_lies(bound: str, rng: np.random.Generator) -> None:
    for mean in (0.03, 0.3, 0.7, 0.95):
        losses = rng.beta(3 * mean, 3 * (1 - mean), (1500, 50))
        assert (bounded_mean(losses, 0.15, 0.05, bound).upper < mean).sum() <= binom.ppf(1 - 1e-4, 1500, 0.05)


# --- shape: order between bounds, monotonicity, edges ---------------------------------------------------------------

means = st.floats(0.0, 1.0)
levels = st.floats(1e-8, 0.5)


@given(eta=means, m=st.integers(1, 5000), level=levels)
def test_kl_is_never_looser_than_hoeffding(eta: float, m: int, level: float) -> None:
    assert kl_upper([eta], m, level)[0] <= hoeffding_upper([eta], m, level)[0] + 1e-9


@given(
    losses=st.lists(st.lists(means, min_size=3, max_size=3), min_size=1, max_size=40),
    eps=st.floats(0.01, 0.99),
    level=levels,
    bound=st.sampled_from(BOUNDS),
)
def test_upper_is_at_most_eps_exactly_where_passed(
    losses: list[list[float]], eps: float, level: float, bound: str
) -> None:
    values = np.array(losses).T
    if bound == "empirical_bernstein" and values.shape[1] < 2:
        values = np.concatenate([values, values], axis=1)
    result = bounded_mean(values, eps, level, bound)
    assert (result.passed == (result.upper <= eps)).all()
    assert (result.upper >= result.eta_hat - 1e-12).all()
    assert (result.upper <= 1).all()
    exact = exact_mean(values, None, eps)
    assert (exact.passed == (exact.upper <= eps)).all()


@given(data=st.data(), level=levels, bound=st.sampled_from(["hoeffding", "kl", "betting"]))
def test_more_loss_never_helps(data: st.DataObject, level: float, bound: str) -> None:
    low = np.array([data.draw(st.lists(means, min_size=2, max_size=30))])
    share = data.draw(means)
    high = low + share * (1 - low)
    before, after = (bounded_mean(values, 0.3, level, bound) for values in (low, high))
    assert after.upper[0] >= before.upper[0] - 1e-12
    assert before.passed[0] or not after.passed[0]


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_laxer_limit_or_level_never_hurts(bound: str, rng: np.random.Generator) -> None:
    losses = rng.beta(1, 15, (40, 100))
    by_eps = [bounded_mean(losses, eps, 1e-3, bound).passed for eps in (0.08, 0.1, 0.15, 0.2, 0.4)]
    by_level = [bounded_mean(losses, 0.14, level, bound).passed for level in (1e-6, 1e-3, 0.05, 0.4)]
    for ladder in (by_eps, by_level):
        assert all((low <= high).all() for low, high in pairwise(ladder))
        assert ladder[-1].sum() > ladder[0].sum()


@pytest.mark.parametrize("bound", BOUNDS)
def test_heads_are_judged_as_if_each_were_alone(bound: str, rng: np.random.Generator) -> None:
    losses = rng.beta(1, 15, (7, 90))
    together = bounded_mean(losses, 0.13, 1e-2, bound)
    for head in range(7):
        alone = bounded_mean(losses[head : head + 1], 0.13, 1e-2, bound)
        assert together.upper[head] == pytest.approx(alone.upper[0], abs=1e-12)
        assert together.passed[head] == alone.passed[0]


@pytest.mark.parametrize("bound", BOUNDS)
def test_all_ones_never_pass_and_bound_the_mean_by_one(bound: str) -> None:
    result = bounded_mean(np.ones((2, 50)), 0.99, 0.5, bound)
    assert not result.passed.any()
    assert result.upper.tolist() == [1.0, 1.0]
    assert result.eta_hat.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bound", BOUNDS)
def test_all_zeros_give_a_mean_of_exactly_zero(bound: str) -> None:
    assert bounded_mean(np.zeros((1, 400)), 0.2, 1e-3, bound).eta_hat[0] == 0.0


@pytest.mark.parametrize("bound", [*SYMMETRIC[:2], "betting"])
def test_one_observer_is_enough_only_at_a_level_it_can_reach(bound: str) -> None:
    assert not bounded_mean(np.zeros((1, 1)), 0.5, 0.4, bound).passed[0]
    assert bounded_mean(np.zeros((1, 1)), 0.5, 0.9, bound).passed[0]


def test_empirical_bernstein_needs_two_observers() -> None:
    with pytest.raises(ConfigError, match="at least 2 observers"):
        bounded_mean(np.zeros((1, 1)), 0.5, 0.4, "empirical_bernstein")


def test_a_loss_that_is_not_a_number_counts_as_one() -> None:
    losses = np.full((1, 4), 0.1)
    losses[0, 2] = np.nan
    assert bounded_mean(losses, 0.5, 0.1, "kl").eta_hat[0] == pytest.approx(1.3 / 4)
    assert exact_mean(losses, None, 0.2).passed.tolist() == [False]


def test_rounding_outside_the_unit_interval_is_clipped_and_more_is_refused() -> None:
    assert bounded_mean(np.full((1, 3), 1.00001), 0.5, 0.1, "kl").eta_hat[0] == 1.0
    assert bounded_mean(np.full((1, 3), -1e-7), 0.5, 0.1, "kl").eta_hat[0] == 0.0
    for wrong in (1.1, -0.01, math.inf):
        with pytest.raises(ValueError, match="masses"):
            bounded_mean(np.full((1, 3), wrong), 0.5, 0.1, "kl")


@pytest.mark.parametrize("shape", [(3,), (2, 0), (2, 3, 4)])
def test_losses_must_be_heads_by_observers(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="heads, observers"):
        bounded_mean(np.zeros(shape), 0.1, 0.1, "kl")


@pytest.mark.parametrize(
    ("eps", "level", "bound"), [(0.0, 0.1, "kl"), (1.0, 0.1, "kl"), (0.1, 0.0, "kl"), (0.1, 1.0, "kl"), (0.1, 0.1, "t")]
)
def test_numbers_out_of_range_are_refused(eps: float, level: float, bound: str) -> None:
    with pytest.raises(ConfigError):
        bounded_mean(np.zeros((1, 2)), eps, level, bound)
    with pytest.raises(ConfigError):
        smallest_m(bound, eps, level)


# --- enumerated supports --------------------------------------------------------------------------------------------


def test_an_enumerated_mean_uses_its_weights() -> None:
    losses = np.array([[0.0, 1.0], [1.0, 0.0]])
    result = exact_mean(losses, [3.0, 1.0], 0.3)
    assert result.eta_hat.tolist() == [0.25, 0.75]
    assert result.upper.tolist() == [0.25, 0.75]
    assert result.passed.tolist() == [True, False]


@pytest.mark.parametrize("eps", [0.1, 0.15, 0.3, 0.7])
@pytest.mark.parametrize("m", [1, 3, 7, 30, 97])
def test_rows_that_all_lose_exactly_eps_pass_and_a_hair_more_fails(eps: float, m: int) -> None:
    equal = np.full((1, m), eps)
    weights = np.geomspace(1, 0.01, m)
    above = equal.copy()
    above[0, m // 2] = np.nextafter(eps, 1)
    for share in (None, weights, weights / weights.sum()):
        assert exact_mean(equal, share, eps).passed[0]
        assert not exact_mean(above, share, eps).passed[0]
        assert exact_mean(above, share, eps).upper[0] > eps


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [np.nan, 1.0]])
def test_weights_that_do_not_fit_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        exact_mean(np.zeros((1, 2)), weights, 0.1)


# --- power ----------------------------------------------------------------------------------------------------------


def power(bound: str, losses: Floats, eps: float, level: float) -> float:
    return float(bounded_mean(losses, eps, level, bound).passed.mean())


def test_betting_is_the_most_powerful_where_masses_vary_little() -> None:
    mean, spread = 0.075, 0.04
    total = mean * (1 - mean) / spread**2 - 1
    losses = np.random.default_rng(5).beta(mean * total, (1 - mean) * total, (1000, 110))
    powers = {bound: power(bound, losses, 0.15, DELTA / 72) for bound in BOUNDS}
    assert powers["betting"] > 0.95
    assert max(powers[bound] for bound in SYMMETRIC) < 0.05


def test_betting_does_not_collapse_where_losses_are_all_or_nothing() -> None:
    losses = (np.random.default_rng(6).random((2000, 128)) < 0.0375) * 1.0
    betting, kl = (power(bound, losses, 0.15, DELTA / 72) for bound in ("betting", "kl"))
    assert betting > 0.7 * kl > 0.3


def test_wealth_once_made_is_not_lost_again() -> None:
    """Betting tests the largest wealth over the draws, so the order in which losses came matters."""
    losses = np.concatenate([np.zeros(60), np.full(20, 0.55)])
    passed = bounded_mean(np.stack([losses, losses[::-1]]), 0.15, 1e-3, "betting")
    assert passed.passed.tolist() == [True, False]
    assert passed.upper[0] == 0.15


def test_a_mean_above_the_limit_never_passes_whatever_was_shown_before() -> None:
    losses = np.concatenate([np.zeros(60), np.full(20, 0.9)])[None]
    result = bounded_mean(losses, 0.15, 1e-3, "betting")
    assert result.log_wealth is not None
    assert result.log_wealth[0] > np.log(1000)
    assert not result.passed[0]
    assert result.upper[0] >= result.eta_hat[0] > 0.15
    again = recheck(
        "betting", eps=0.15, level=1e-3, m=80, eta_hat=result.eta_hat, upper=result.upper, log_wealth=result.log_wealth
    )
    assert not again[0]


# --- verification from a record -------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), bound=st.sampled_from(BOUNDS), m=st.integers(2, 300))
def test_recorded_numbers_give_the_recorded_verdicts(seed: int, bound: str, m: int) -> None:
    rng = np.random.default_rng(seed)
    losses = rng.beta(1, rng.uniform(5, 40), (9, m))
    result = bounded_mean(losses, 0.15, 1e-2, bound)
    rounded = [
        None if values is None else [float(f"{value:.9g}") for value in values]
        for values in (result.eta_hat, result.upper, result.log_wealth, result.variance)
    ]
    recorded = dict(zip(("eta_hat", "upper", "log_wealth", "variance"), rounded, strict=True))
    verdicts = [
        recheck(bound, eps=0.15, level=1e-2, m=m, **recorded, leeway=leeway)  # type: ignore[arg-type]
        for leeway in (-1e-8, 1e-8)
    ]
    assert (verdicts[0] <= result.passed).all()
    assert (result.passed <= verdicts[1]).all()


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_flipped_verdict_does_not_follow(bound: str) -> None:
    losses = np.stack([np.zeros(400), np.full(400, 0.5)])
    result = bounded_mean(losses, 0.15, 1e-3, bound)
    assert result.passed.tolist() == [True, False]
    numbers = {"eps": 0.15, "level": 1e-3, "m": 400, "leeway": 1e-8}
    wealth = result.log_wealth
    checked = recheck(bound, eta_hat=result.eta_hat, upper=result.upper, log_wealth=wealth, **numbers)  # type: ignore[arg-type]
    assert checked.tolist() == [True, False]
    swapped = None if wealth is None else wealth[::-1]
    lie = recheck(bound, eta_hat=result.eta_hat[::-1], upper=result.upper[::-1], log_wealth=swapped, **numbers)  # type: ignore[arg-type]
    assert lie.tolist() == [False, True]


def test_an_upper_bound_below_what_any_variance_allows_is_not_believed() -> None:
    checked = recheck("empirical_bernstein", eps=0.15, level=1e-3, m=50, eta_hat=[0.1], upper=[0.12])
    assert checked.tolist() == [False]


def test_empirical_bernstein_is_decided_by_the_recorded_variance() -> None:
    numbers = {"eps": 0.15, "level": 1e-3, "m": 400, "eta_hat": [0.05, 0.05], "upper": [0.1, 0.1]}
    checked = recheck("empirical_bernstein", variance=[1e-4, 0.1], **numbers)  # type: ignore[arg-type]
    assert checked.tolist() == [True, False]


def test_an_exact_mean_is_checked_against_the_limit() -> None:
    checked = recheck("exact", eps=0.15, level=None, m=30, eta_hat=[0.15, 0.151], upper=[0.15, 0.151])
    assert checked.tolist() == [True, False]


def test_a_record_without_the_number_a_bound_needs_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="log_wealth"):
        recheck("betting", eps=0.1, level=0.01, m=5, eta_hat=[0.0], upper=[0.1])
    with pytest.raises(ValueError, match="level"):
        recheck("kl", eps=0.1, level=None, m=5, eta_hat=[0.0], upper=[0.1])
