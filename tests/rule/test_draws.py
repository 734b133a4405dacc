"""The table of observers needed: each number passes, one less does not, and what is said of the bounds is so."""

from __future__ import annotations

import numpy as np
import pytest

from entroprefill_rag.rule.bounds import BOUNDS, bounded_mean
from entroprefill_rag.rule.draws import (
    EPS_AUDITS,
    ETA_HATS,
    STATEMENTS,
    losses_of,
    observers_table,
    smallest_that_passes,
)


@pytest.fixture(scope="module")
def cells() -> dict[tuple[str, str, float, float, int], int | None]:
    return {(one.bound, one.losses, one.eta_hat, one.eps_audit, one.statements): one.m for one in observers_table()}


def test_every_number_passes_and_for_like_losses_one_less_does_not(cells) -> None:  # type: ignore[no-untyped-def]
    for (bound, losses, eta, eps, count), m in cells.items():
        assert (m is None) == (eta >= eps)
        if m is None:
            continue
        level = 0.05 / count
        assert bounded_mean(losses_of(losses, eta, m)[None], eps, level, bound).passed[0]
        less = losses_of(losses, eta, m - 1)
        if losses == "constant" and m > 2:
            assert not bounded_mean(less[None], eps, level, bound).passed[0]


def test_the_numbers_that_the_theory_page_states(cells) -> None:  # type: ignore[no-untyped-def]
    """Correction 8: J = 8, H = 9, eps = .1, delta = .05."""
    assert cells["hoeffding", "constant", 0.0, 0.1, 72] == 364
    assert cells["kl", "constant", 0.0, 0.1, 72] == 70
    assert cells["empirical_bernstein", "constant", 0.0, 0.1, 72] == 187


def test_what_the_page_says_of_the_bounds_is_so(cells) -> None:  # type: ignore[no-untyped-def]
    for eta in ETA_HATS:
        for eps in EPS_AUDITS:
            if eta >= eps:
                continue
            for count in STATEMENTS:
                betting, kl = cells["betting", "constant", eta, eps, count], cells["kl", "constant", eta, eps, count]
                if eta == 0.0:
                    assert 0 <= betting - kl <= 3
                    assert betting < 0.4 * cells["hoeffding", "constant", eta, eps, count]
                    continue
                assert betting < min(
                    cells[bound, "constant", eta, eps, count] for bound in BOUNDS if bound != "betting"
                )
                assert kl < cells["betting", "zero_one", eta, eps, count]


@pytest.mark.parametrize("eta", [0.01, 0.1, 0.35])
def test_losses_of_zero_and_one_have_at_least_the_mean_asked_for_and_hardly_more(eta: float) -> None:
    for m in (1, 7, 100, 1001):
        losses = losses_of("zero_one", eta, m)
        assert set(np.unique(losses)) <= {0.0, 1.0}
        assert eta - 1e-9 <= losses.mean() < eta + 1.0 / m


def test_no_number_shows_what_is_false() -> None:
    assert smallest_that_passes("betting", "constant", 0.2, 0.2, 0.01) is None
