"""Whatever the losses, wealth and bound lie in the ranges that their mean allows; and the ranges are attained."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entroprefill_rag.rule.bounds import bounded_mean
from entroprefill_rag.verify.bets import upper_range, wealth_range

EPS, LEVEL = 0.2, 0.01


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(2, 120), spread=st.floats(0.05, 20), share=st.floats(0.01, 0.99))
def test_no_losses_leave_the_ranges(seed, m, spread, share):
    rng = np.random.default_rng(seed)
    losses = rng.beta(spread * share, spread * (1 - share), (4, m))
    losses[0] = np.sort(losses[0])
    losses[1] = (losses[1] < share).astype(float)
    result = bounded_mean(losses, EPS, LEVEL, "betting")
    low, high = wealth_range(result.eta_hat, m, EPS)
    assert (low <= result.log_wealth + 1e-9).all()
    assert (result.log_wealth <= high + 1e-9).all()
    low, high = upper_range(result.eta_hat, m, LEVEL)
    low = np.where(result.passed, np.minimum(low, EPS), np.maximum(low, EPS))
    high = np.where(result.passed, np.minimum(high, EPS), np.maximum(high, EPS))
    assert (low <= result.upper + 1e-9).all()
    assert (result.upper <= high + 1e-9).all()


@pytest.mark.parametrize("eta", [0.0, 0.05, 0.5])
def test_constant_losses_attain_the_least_bound_and_losses_of_one_the_largest(eta):
    m = 100
    ones = np.repeat([1.0, 0.0], [round(eta * m), m - round(eta * m)])
    constant, extreme = bounded_mean(np.stack([np.full(m, eta), ones]), 0.999, LEVEL, "betting").upper
    low, high = upper_range(np.array([eta]), m, LEVEL)
    assert abs(constant - low[0]) < 2e-4
    assert abs(extreme - high[0]) < 2e-4
