"""P-values and fixed-sequence testing, against simulated workloads whose expected loss is known."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from entroprefill_rag.certificate.pvalues import (
    fixed_sequence,
    hoeffding,
    hoeffding_bentkus,
    smallest_alpha,
    smallest_n,
)

ALPHA, DELTA, N, TRIALS = 0.1, 0.05, 200, 4000
FILE = Path(__file__).parent.parent.parent / "benchmarks" / "certificate.py"


@pytest.fixture(scope="module")
def simulation():
    spec = importlib.util.spec_from_file_location("certificate_simulation", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def errors(simulation, workload, procedure):
    return simulation.errors(workload, procedure, trials=TRIALS, n=N, alpha=ALPHA, delta=DELTA, seed=3)


@pytest.mark.parametrize("place", range(4))
def test_false_certificates_are_no_more_than_delta(simulation, place):
    workload = simulation.workloads(ALPHA)[place]
    assert max(workload.risks) > ALPHA
    assert errors(simulation, workload, "fixed sequence, Hoeffding-Bentkus") <= simulation.most_errors(TRIALS, DELTA)


@pytest.mark.parametrize("procedure", ["each alone at delta (invalid)", "mean below alpha (invalid)"])
def test_invalid_procedures_fail_the_same_test(simulation, procedure):
    worst = max(errors(simulation, workload, procedure) for workload in simulation.workloads(ALPHA))
    assert worst > simulation.most_errors(TRIALS, DELTA)


def test_a_safe_grid_is_certified_in_nearly_every_trial(simulation):
    safe = simulation.Workload("safe", (0.0, 0.01, 0.02), together=True, shares=False)
    totals = safe.totals(np.random.default_rng(0), 500, N)
    certified = simulation.in_sequence(totals, N, ALPHA, DELTA)
    assert certified[:, 0].all()  # without any loss, always
    assert certified.all(axis=1).mean() > 0.95


def test_the_p_value_is_the_smaller_of_the_two_tails():
    total, n, alpha = 3.5, 50, 0.2
    mean = total / n
    kl = mean * math.log(mean / alpha) + (1 - mean) * math.log((1 - mean) / (1 - alpha))
    tails = (math.exp(-n * kl), math.e * binom.cdf(4, n, alpha))  # 3.5 is rounded up
    assert hoeffding_bentkus(total, n, alpha) == pytest.approx(min(tails))
    assert hoeffding(total, n, alpha) == pytest.approx(math.exp(-2 * n * (alpha - mean) ** 2))


@given(st.integers(1, 400), st.floats(0.01, 0.9), st.floats(0.0, 1.0))
def test_it_grows_with_the_loss_and_is_never_above_hoeffding(n, alpha, share):
    total = share * n
    p = float(hoeffding_bentkus(total, n, alpha))
    assert 0.0 <= p <= 1.0
    assert p <= float(hoeffding(total, n, alpha)) + 1e-12  # Pinsker
    assert p <= float(hoeffding_bentkus(min(n, total + 0.5), n, alpha)) + 1e-12
    if share >= alpha:
        assert p == pytest.approx(1.0)


@given(st.floats(0.01, 0.5), st.floats(0.001, 0.3), st.integers(1, 300))
def test_it_is_valid_for_every_level_where_losses_are_zero_or_one(alpha, level, n):
    counts = np.arange(n + 1)
    rejected = hoeffding_bentkus(counts, n, alpha) <= level
    assert binom.pmf(counts, n, alpha)[rejected].sum() <= level + 1e-12


def test_without_loss_29_requests_are_enough_for_a_tenth_at_one_in_twenty():
    assert smallest_n(0.1, 0.05) == 29
    assert hoeffding_bentkus(0.0, 29, 0.1) == pytest.approx(0.9**29)
    assert hoeffding_bentkus(0.0, 28, 0.1) > 0.05
    assert smallest_alpha(29, 0.05) < 0.1 < smallest_alpha(28, 0.05)


@given(st.floats(0.02, 0.9), st.floats(0.001, 0.5))
def test_smallest_n_is_smallest(alpha, delta):
    n = smallest_n(alpha, delta)
    assert hoeffding_bentkus(0.0, n, alpha) <= delta
    assert n == 1 or hoeffding_bentkus(0.0, n - 1, alpha) > delta


def test_the_sequence_ends_at_the_first_that_is_not_rejected():
    assert fixed_sequence([0.01, 0.05, 0.2, 0.001], 0.05) == 2
    assert fixed_sequence([0.06, 0.001], 0.05) == 0
    assert fixed_sequence([0.01], 0.05) == 1
    assert fixed_sequence([math.nan, 0.0], 0.05) == 0


@pytest.mark.parametrize(("n", "alpha"), [(0, 0.1), (5, 0.0), (5, 1.0)])
def test_levels_that_are_none_are_refused(n, alpha):
    with pytest.raises(ValueError, match=f"alpha={alpha}"):
        hoeffding_bentkus(0.0, n, alpha)
