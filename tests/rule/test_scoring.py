"""Chunk scores."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entroprefill_rag.rule.scoring import chunk_scores, concentrations, relative_masses

CHUNKS = st.integers(2, 12).flatmap(
    lambda k: st.tuples(
        st.lists(st.floats(0.0, 1.0), min_size=k, max_size=k).map(lambda a: np.array(a) / max(sum(a), 1.0)),
        st.lists(st.integers(1, 400), min_size=k, max_size=k).map(np.array),
        st.lists(st.floats(0.0, 1.0), min_size=k, max_size=k).map(np.array),
    )
)


def score(mass, tokens, kappa, alpha=0.01, lam=0.25):
    return chunk_scores(relative_masses(mass, tokens, alpha), kappa, lam)


def test_relative_mass_is_one_where_mass_follows_length():
    tokens = np.array([10, 30, 60])
    np.testing.assert_allclose(relative_masses(0.4 * tokens / 100, tokens, 0.05), 1.0)


def test_without_any_mass_every_chunk_is_as_expected():
    np.testing.assert_allclose(relative_masses(np.zeros(3), np.array([1, 2, 3]), 0.01), 1.0)


def test_a_chunk_without_tokens_has_nothing_to_expect():
    assert relative_masses(np.array([0.2, 0.0]), np.array([4, 0]), 0.01)[1] == 1.0


@given(CHUNKS, st.floats(0.001, 10.0))
def test_relative_mass_is_positive_and_averages_to_one_by_length(chunks, alpha):
    mass, tokens, _ = chunks
    relative = relative_masses(mass, tokens, alpha)
    assert (relative > 0).all()
    assert np.average(relative, weights=tokens) == pytest.approx(1.0)


@given(CHUNKS, st.floats(0.001, 1.0), st.floats(0.0, 5.0))
def test_concentration_never_overturns_a_ratio_of_relative_masses_above_e_to_the_lambda(chunks, alpha, lam):
    mass, tokens, kappa = chunks
    relative = relative_masses(mass, tokens, alpha)
    scores = chunk_scores(relative, kappa, lam)
    for i in range(len(mass)):
        for j in range(len(mass)):
            if relative[i] / relative[j] > np.exp(lam) * (1 + 1e-12):
                assert scores[i] > scores[j]


def test_the_factor_e_to_the_lambda_is_attained():
    lam = 0.5
    relative, kappa = np.array([1.0, np.exp(lam) * 0.999]), np.array([1.0, 0.0])
    scores = chunk_scores(relative, kappa, lam)
    assert scores[0] > scores[1]


@given(CHUNKS, st.randoms())
def test_scores_follow_their_chunks_when_chunks_change_places(chunks, random):
    mass, tokens, kappa = chunks
    order = list(range(len(mass)))
    random.shuffle(order)
    np.testing.assert_allclose(
        score(mass[order], tokens[order], kappa[order]), score(mass, tokens, kappa)[order], rtol=1e-9, atol=1e-12
    )


def test_concentration_is_one_on_a_single_token_and_zero_on_an_even_spread():
    mass = np.array([0.0, 0.3, 0.0, 0.1, 0.1, 0.1, 0.1])
    owner = np.array([0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_allclose(concentrations(mass, owner, 2), [1.0, 0.0], atol=1e-12)


def test_concentration_is_zero_for_one_token_for_no_mass_and_for_no_token():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kappa = concentrations(np.array([0.7, 0.0, 0.0]), np.array([0, 1, 1]), 3)
    assert list(kappa) == [0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.floats(0.0, 1.0, width=32), st.integers(0, 3)), min_size=1, max_size=60))
def test_concentration_lies_between_zero_and_one(tokens):
    tokens.sort(key=lambda token: token[1])
    mass = np.array([token[0] for token in tokens], dtype=np.float32)
    kappa = concentrations(mass, np.array([token[1] for token in tokens]), 4)
    assert ((kappa >= 0) & (kappa <= 1)).all()


@pytest.mark.parametrize("n", [3, 7, 100, 1001])
def test_rounding_of_an_even_spread_is_clamped(n):
    assert concentrations(np.full(n, 1 / 3), np.zeros(n, int), 1)[0] == pytest.approx(0.0, abs=1e-12)
    assert concentrations(np.full(n, 1 / 3), np.zeros(n, int), 1)[0] >= 0.0


def test_concentration_survives_masses_whose_square_underflows_in_float32():
    mass = np.array([1e-30, 3e-30, 0.0], dtype=np.float32)
    assert np.square(mass).sum() == 0.0
    kappa = concentrations(mass, np.zeros(3, int), 1)
    assert kappa[0] == pytest.approx(1 + np.log(10 / 16) / np.log(3))
