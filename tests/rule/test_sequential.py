"""Stopping early spends no more error, changes no verdict, and draws no more than needed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.bounds import bounded_mean, smallest_m
from entroprefill_rag.rule.concentration import kl_passes
from entroprefill_rag.rule.sequential import batch_slices, sequential_mean

EPS, LEVEL = 0.15, 1e-3


def batches(losses: NDArray[np.float64], size: int) -> Iterator[NDArray[np.float64]]:
    for start in range(0, losses.shape[1], size):
        yield losses[:, start : start + size]


def test_it_stops_once_every_head_passed_and_draws_nothing_more() -> None:
    def endless() -> Iterator[NDArray[np.float64]]:
        for _ in range(30):
            yield np.full((4, 10), 0.01)
        raise AssertionError("read on after the outcome was certain")

    result = sequential_mean(endless(), eps=EPS, level=LEVEL, draws=1000)

    assert result.stopped == "passed"
    assert result.drawn == 50
    assert result.bounded.passed.all()
    assert not bounded_mean(np.full((4, 40), 0.01), EPS, LEVEL, "betting").passed.any(), "one batch fewer must not do"


def test_it_gives_up_once_one_head_cannot_pass_any_more() -> None:
    losses = np.zeros((3, 200))
    losses[1] = 0.4
    result = sequential_mean(batches(losses, 10), eps=EPS, level=LEVEL, draws=200)

    assert result.stopped == "hopeless"
    assert result.drawn < 200
    seen = losses[:, : result.drawn]
    rest = np.zeros((3, 200 - result.drawn))
    assert not bounded_mean(np.concatenate([seen, rest], axis=1), EPS, LEVEL, "betting").passed.all()
    earlier = losses[:, : result.drawn - 10]
    rest = np.zeros((3, 210 - result.drawn))
    assert bounded_mean(np.concatenate([earlier, rest], axis=1), EPS, LEVEL, "betting").passed.all(), "gave up late"


def test_it_may_run_out_of_batches() -> None:
    result = sequential_mean([np.zeros((2, 5))], eps=EPS, level=LEVEL, draws=500)
    assert (result.stopped, result.drawn) == ("exhausted", 5)
    assert not result.bounded.passed.any()


def test_an_audit_that_fails_after_its_last_draw_is_exhausted_not_hopeless() -> None:
    draws = smallest_m("betting", EPS, LEVEL)
    losses = np.zeros((2, draws))
    losses[1, -1] = 0.9  # until the last draw, this head too might pass
    result = sequential_mean(batches(losses, draws - 1), eps=EPS, level=LEVEL, draws=draws)
    assert (result.stopped, result.drawn) == ("exhausted", draws)
    assert result.bounded.passed.tolist() == [True, False]


def test_a_head_that_was_shown_early_does_not_pass_while_its_mean_is_above_the_limit() -> None:
    losses = np.zeros((2, 300))
    losses[0, 60:100] = 0.9  # its wealth is made by then
    losses[1, :20] = 0.9  # this one needs longer
    result = sequential_mean(batches(losses, 20), eps=EPS, level=LEVEL, draws=300)
    assert result.stopped == "passed"
    seen = losses[:, : result.drawn]
    assert (seen.mean(axis=1) <= EPS).all()
    assert result.bounded.passed.all()

    losses[0, 60:] = 0.9
    result = sequential_mean(batches(losses, 20), eps=EPS, level=LEVEL, draws=300)
    assert result.stopped == "hopeless"
    assert result.drawn < 300
    assert not result.bounded.passed[0]


@given(seed=st.integers(0, 1000), size=st.integers(1, 130), heads=st.integers(1, 6))
def test_the_verdict_is_the_one_of_a_single_look_at_the_end(seed: int, size: int, heads: int) -> None:
    rng = np.random.default_rng(seed)
    losses = rng.beta(1, 1 / rng.uniform(0.03, 0.15, (heads, 1)) - 1, (heads, 120))
    result = sequential_mean(batches(losses, size), eps=EPS, level=LEVEL, draws=120)
    whole = bounded_mean(losses, EPS, LEVEL, "betting")
    assert result.bounded.passed.all() == whole.passed.all()
    assert (result.stopped == "passed") == whole.passed.all()
    if result.drawn == 120:
        assert (result.bounded.passed == whole.passed).all()


@pytest.mark.slow
def test_looking_often_with_a_fixed_sample_bound_errs_too_often_and_the_sequential_audit_does_not() -> None:
    eps, level, runs = 0.5, 0.05, 2000
    losses = (np.random.default_rng(11).random((runs, 3000)) < eps) * 1.0
    means = losses.cumsum(axis=1) / np.arange(1, 3001)
    allowed = binom.ppf(1 - 1e-4, runs, level)

    looks = [kl_passes(means[:, m - 1], m, eps, level) for m in range(10, 3001, 10)]
    assert max(look.sum() for look in looks) <= allowed, "one look is valid"
    assert np.any(looks, axis=0).sum() > allowed, "many looks are not"

    false = sum(
        sequential_mean(batches(head[None], 10), eps=eps, level=level, draws=300).stopped == "passed"
        for head in losses[:1000, :300]
    )
    assert false <= binom.ppf(1 - 1e-4, 1000, level)


def test_clear_cases_need_fewer_draws_than_the_fixed_audit() -> None:
    rng = np.random.default_rng(3)
    drawn = [
        sequential_mean(batches(rng.beta(1, 40, (9, 128)), 16), eps=EPS, level=0.05 / 72, draws=128).drawn
        for _ in range(50)
    ]
    assert np.mean(drawn) < 90


@given(draws=st.integers(1, 2000), first=st.integers(1, 300), growth=st.floats(1.01, 4.0))
def test_batches_cover_every_draw_once_and_grow(draws: int, first: int, growth: float) -> None:
    slices = list(batch_slices(draws, first, growth))
    covered = [i for piece in slices for i in range(piece.start, piece.stop)]
    assert covered == list(range(draws))
    assert slices[0].stop == min(first, draws)


def test_what_is_no_sequential_audit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        sequential_mean([], eps=EPS, level=LEVEL, draws=10)
    with pytest.raises(ValueError, match="announced"):
        sequential_mean([np.zeros((1, 30))] * 2, eps=EPS, level=LEVEL, draws=50)
    with pytest.raises(ConfigError):
        sequential_mean([np.zeros((1, 1))], eps=1.0, level=LEVEL, draws=10)
    with pytest.raises(ConfigError):
        list(batch_slices(10, 5, 1.0))
