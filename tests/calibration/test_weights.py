"""Weights of a profile over a whole layer (correction 6): floor, sum, and the envelope with the same constants."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entroprefill_rag.config import HeadProfile
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.pooling import head_weights, pool_heads, pooled_chunks, profile_weights
from entroprefill_rag.rule.stability import envelope, envelope_per_head

GROUPS, HEADS = 3, 9


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.05, 0.3, 1.0]))
def test_weights_sum_to_the_groups_and_keep_the_floor(seed, zeta):
    rng = np.random.default_rng(seed)
    v = rng.dirichlet(np.ones(HEADS)) * (rng.random(HEADS) < 0.6)
    w, _ = profile_weights(v, rng.random(HEADS) < 0.7, groups=GROUPS, zeta=zeta)
    assert w.sum() == pytest.approx(GROUPS)
    assert (w >= zeta * GROUPS / HEADS * (1 - 1e-12)).all()


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.05, 0.3, 1.0]))
def test_no_head_or_row_loses_more_than_the_envelope(seed, zeta):
    rng = np.random.default_rng(seed)
    masses = rng.dirichlet(np.full(12, 0.1), (HEADS, 4))[..., :8]
    w, _ = profile_weights(rng.dirichlet(np.full(HEADS, 0.2)), rng.random(HEADS) < 0.7, groups=GROUPS, zeta=zeta)
    removed = [0, 3, 5]
    q = float(pooled_chunks(masses, w, GROUPS)[removed].sum())
    lost = masses[..., removed].sum(axis=-1).max(axis=1)
    sharp = envelope_per_head(q, rows=4, groups=GROUPS, weights=w)
    assert (lost <= sharp * (1 + 1e-9)).all()
    assert (sharp <= envelope(q, rows=4, query_heads=HEADS, zeta=zeta) * (1 + 1e-9)).all()


def test_the_envelope_is_attained_by_a_head_at_the_floor():
    w, _ = profile_weights((1.0, *(0.0,) * 8), np.ones(HEADS, bool), groups=GROUPS, zeta=0.2)
    masses = np.zeros((HEADS, 2, 1))
    masses[4, 1, 0] = 0.01
    q = float(pooled_chunks(masses, w, GROUPS)[0])
    assert envelope(q, rows=2, query_heads=HEADS, zeta=0.2) == pytest.approx(0.01)


def test_an_ineligible_head_loses_its_weight_to_the_other_picked_ones():
    v = (0.5, 0.5, *(0.0,) * 7)
    w, empty = profile_weights(v, np.arange(HEADS) == 1, groups=GROUPS, zeta=0.1)
    assert w[1] == pytest.approx(GROUPS * (0.9 + 0.1 / 9))
    assert w[0] == pytest.approx(GROUPS * 0.1 / 9)
    assert empty == 2


def test_where_no_picked_head_is_eligible_nothing_decides():
    weights = HeadProfile(name="p", weights=((4, (1.0, *(0.0,) * 8)),))
    rows = np.full((HEADS, 5), 0.1)
    rows[0] = 0.0
    more = {"groups": GROUPS, "mu_min": 0.2, "tau": 1.0, "zeta": 0.1}
    found = pool_heads(rows, np.arange(5), kind=weights, layer=4, **more)
    assert found.all_fall_back
    assert found.eligible.sum() == 8
    assert found.weights == pytest.approx(1 / 3)
    other = pool_heads(rows, np.arange(5), kind=weights, layer=5, **more)
    assert (other.weighting, other.all_fall_back) == ("renyi", False)


@pytest.mark.parametrize("v", [(1.0,), (-0.5, 1.5, *(0.0,) * 7), (float("nan"), *(0.0,) * 8)])
def test_weights_that_are_none_are_refused(v):
    with pytest.raises(ConfigError, match="entroprefill calibrate"):
        profile_weights(v, np.ones(HEADS, bool), groups=GROUPS, zeta=0.1)


def test_a_name_alone_is_no_profile():
    with pytest.raises(ConfigError, match="fingerprint"):
        head_weights(np.zeros(4), np.ones(4, bool), groups=2, zeta=0.1, kind="profile")


@pytest.mark.parametrize("weights", [((2, (0.5, 0.4)),), ((2, (1.5, -0.5)),), ((2, ()),), ((3, (1.0,)), (2, (1.0,)))])
def test_a_head_profile_that_is_not_shares_of_ascending_layers_is_refused(weights):
    with pytest.raises(ValueError):
        HeadProfile(name="p", weights=weights)
