"""Renyi pooling of heads."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.pooling import head_weights, pool_heads, pooled_chunks, pooled_tokens, renyi_entropy

ENTROPIES = arrays(np.float64, (6,), elements=st.floats(0.0, 12.0))
ELIGIBLE = arrays(np.bool_, (6,))


def one_hot_and_flat(heads, tokens):
    """Head 0 looks at one token, the others at all of them."""
    rows = np.full((heads, tokens), 1.0 / tokens)
    rows[0] = 0.0
    rows[0, tokens // 2] = 1.0
    return rows


def test_entropy_is_the_log_of_the_effective_number_of_tokens():
    mass, entropy = renyi_entropy(np.array([[0.1, 0.1, 0.1, 0.1], [0.0, 0.5, 0.0, 0.0]]))
    np.testing.assert_allclose(mass, [0.4, 0.5])
    np.testing.assert_allclose(entropy, [np.log(4), 0.0], atol=1e-12)


def test_entropy_survives_probabilities_whose_square_underflows_in_float32():
    tiny = np.full((1, 64), 1e-30, dtype=np.float32)
    assert np.square(tiny).sum() == 0.0
    _, entropy = renyi_entropy(tiny)
    assert entropy[0] == pytest.approx(np.log(64))


def test_no_mass_means_infinite_entropy_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mass, entropy = renyi_entropy(np.zeros((2, 5)))
    assert (mass == 0).all()
    assert np.isposinf(entropy).all()


@given(ENTROPIES, ELIGIBLE, st.floats(0.01, 1.0), st.floats(0.001, 50.0), st.sampled_from(["renyi", "uniform"]))
def test_weights_are_floored_and_sum_to_one_in_every_group(entropy, eligible, zeta, tau, kind):
    weights, fallback = head_weights(entropy, eligible, groups=2, zeta=zeta, tau=tau, kind=kind)
    np.testing.assert_allclose(weights.reshape(2, 3).sum(axis=1), 1.0)
    assert (weights >= zeta / 3 * (1 - 1e-12)).all()
    assert fallback == sum(not group.any() for group in eligible.reshape(2, 3))


@given(ENTROPIES, st.floats(0.01, 0.99))
def test_a_more_focused_head_never_weighs_less_than_its_neighbour(entropy, zeta):
    weights, _ = head_weights(entropy, np.ones(6, bool), groups=2, zeta=zeta, tau=0.7)
    for group in range(2):
        inside = slice(3 * group, 3 * group + 3)
        order = np.argsort(entropy[inside])
        assert (np.diff(weights[inside][order]) <= 1e-12).all()


@given(ENTROPIES, ELIGIBLE, st.permutations(range(3)))
def test_reordering_the_heads_of_a_group_reorders_their_weights(entropy, eligible, order):
    before, _ = head_weights(entropy, eligible, groups=2, zeta=0.2)
    moved = [*order, 3, 4, 5]
    after, _ = head_weights(entropy[moved], eligible[moved], groups=2, zeta=0.2)
    np.testing.assert_allclose(after, before[moved], rtol=1e-12)


def test_the_weight_of_a_diffuse_head_tends_to_the_floor():
    zeta, r = 0.3, 3
    gaps = []
    for spread in (1.0, 5.0, 20.0):
        weights, _ = head_weights(np.array([0.0, 0.0, spread]), np.ones(3, bool), groups=1, zeta=zeta, tau=1.0)
        gaps.append(weights[2] - zeta / r)
    assert gaps[0] > gaps[1] > gaps[2] >= 0
    assert gaps[2] < 1e-8


def test_a_head_that_looks_at_sinks_only_sits_exactly_on_the_floor():
    rows = one_hot_and_flat(3, 40)
    rows[2] = 0.0
    rows[2, 0] = 1.0
    pooling = pool_heads(rows, np.arange(4, 40), groups=1, mu_min=0.05, tau=1.0, zeta=0.3)
    assert list(pooling.eligible) == [True, True, False]
    assert pooling.weights[2] == pytest.approx(0.3 / 3)
    assert pooling.weights[0] > pooling.weights[1] > pooling.weights[2]


def test_a_group_without_an_eligible_head_weighs_its_heads_evenly():
    eligible = np.array([True, False, False, False])
    weights, fallback = head_weights(np.zeros(4), eligible, groups=2, zeta=0.1)
    assert fallback == 1
    np.testing.assert_allclose(weights, [0.95, 0.05, 0.5, 0.5])


def test_a_layer_without_an_eligible_head_says_so():
    rows = np.zeros((4, 10))
    rows[:, 0] = 1.0
    pooling = pool_heads(rows, np.arange(4, 10), groups=2, mu_min=0.01, tau=1.0, zeta=0.1)
    assert pooling.all_fall_back
    assert pooling.fallback_groups == 2
    np.testing.assert_allclose(pooling.weights, 0.5)


def test_over_documents_a_head_locked_on_a_delimiter_is_not_taken_for_a_focused_one():
    rows = np.full((2, 20), 1 / 20)
    rows[0] = 0.0
    rows[0, 10], rows[0, 4:8] = 0.9, 0.025
    documents = np.r_[4:10, 11:20]
    paper = pool_heads(rows, np.arange(4, 20), groups=1, mu_min=0.05, tau=1.0, zeta=0.1)
    ours = pool_heads(rows, documents, groups=1, mu_min=0.2, tau=1.0, zeta=0.1)
    assert paper.weights[0] > 0.7
    assert not ours.eligible[0]
    assert ours.weights[0] == pytest.approx(0.05)


def test_a_very_small_temperature_picks_the_most_focused_head_without_underflow():
    weights, _ = head_weights(np.array([800.0, 801.0]), np.ones(2, bool), groups=1, zeta=0.1, tau=1e-3)
    np.testing.assert_allclose(weights, [0.95, 0.05])


def test_plugged_in_weights_are_normalised_and_floored():
    weights, _ = head_weights(
        np.zeros(4), np.array([1, 1, 1, 0], bool), groups=2, zeta=0.2, kind=lambda h, e: [[3, 1], [7, 9]]
    )
    np.testing.assert_allclose(weights, [0.8 * 0.75 + 0.1, 0.8 * 0.25 + 0.1, 0.9, 0.1])


def test_plugged_in_weights_see_copies_and_infinite_entropy_at_ineligible_heads():
    seen = {}

    def weigh(entropy, eligible):
        seen["entropy"] = entropy.copy()
        entropy[:] = -1
        eligible[:] = True
        return np.ones_like(entropy)

    entropy, eligible = np.array([1.0, 2.0]), np.array([True, False])
    weights, _ = head_weights(entropy, eligible, groups=1, zeta=0.1, kind=weigh)
    assert list(seen["entropy"][0]) == [1.0, np.inf]
    np.testing.assert_allclose(weights, [0.95, 0.05])
    assert list(entropy) == [1.0, 2.0]


def test_plugged_in_weights_that_prefer_nobody_are_even_over_eligible_heads():
    weights, _ = head_weights(
        np.zeros(3), np.array([1, 1, 0], bool), groups=1, zeta=0.3, kind=lambda h, e: np.zeros((1, 3))
    )
    np.testing.assert_allclose(weights, [0.45, 0.45, 0.1])


def test_huge_plugged_in_weights_do_not_overflow():
    weights, _ = head_weights(
        np.zeros(2), np.ones(2, bool), groups=1, zeta=0.2, kind=lambda h, e: np.full((1, 2), 1.7e308)
    )
    np.testing.assert_allclose(weights, 0.5)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.ones(4), "shape"),
        ([[1, -1], [1, 1]], "-1"),
        ([[1, np.nan], [1, 1]], "nan"),
        ([[1, np.inf], [1, 1]], "inf"),
    ],
)
def test_plugged_in_weights_that_are_no_weights_are_refused(returned, message):
    with pytest.raises(ConfigError, match=message):
        head_weights(np.zeros(4), np.ones(4, bool), groups=2, zeta=0.1, kind=lambda h, e: returned)


def test_pooled_mass_of_tokens_and_of_chunks_agree():
    rng = np.random.default_rng(3)
    rows = rng.dirichlet(np.ones(30), size=(4, 5))
    spans = ((5, 12), (12, 13), (20, 28))
    masses = np.stack([rows[..., s:e].sum(-1) for s, e in spans], axis=-1)
    weights, _ = head_weights(rng.uniform(0, 3, 4), np.ones(4, bool), groups=2, zeta=0.2)
    tokens = pooled_tokens(rows.mean(axis=1), weights, 2)
    chunks = pooled_chunks(masses, weights, 2)
    assert tokens.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(chunks, [tokens[s:e].sum() for s, e in spans])
