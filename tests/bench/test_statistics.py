"""Intervals and tests, against values that are known."""

import numpy as np
import pytest
from scipy.stats import binom

from entroprefill_rag.bench.statistics import Removed, against_chance, estimate, ratio


def test_an_estimate_is_the_mean_with_an_interval_around_it():
    values = np.repeat([0.0, 1.0], 50)
    found = estimate(values)
    assert (found.mean, found.n) == (0.5, 100)
    # 1.96 standard errors of a share of one half over 100 are 0.098.
    assert found.low == pytest.approx(0.402, abs=0.02)
    assert found.high == pytest.approx(0.598, abs=0.02)
    assert estimate([]) is None


def test_the_same_values_give_the_same_interval():
    assert estimate([1.0, 2.0, 5.0]) == estimate([1.0, 2.0, 5.0])


def test_ratios_are_averaged_on_the_scale_of_factors():
    found = ratio([2.0, 8.0], [1.0, 1.0])
    assert found.mean == pytest.approx(4.0)
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(8.0)


def test_one_gold_chunk_of_ten_with_five_kept_is_a_coin():
    one = Removed(chunks=10, gold=1, kept=5, gold_kept=1)
    assert against_chance([one]).p == pytest.approx(0.5)
    assert against_chance([one] * 7).p == pytest.approx(0.5**7)


def test_many_coins_are_a_binomial():
    hit, miss = (Removed(chunks=10, gold=1, kept=5, gold_kept=k) for k in (1, 0))
    found = against_chance([hit] * 22 + [miss] * 8)
    assert found.p == pytest.approx(binom.sf(21, 30, 0.5))
    assert (found.requests, found.gold, found.kept, found.expected) == (30, 30, 22, 15.0)


def test_keeping_no_gold_is_no_evidence():
    assert against_chance([Removed(chunks=10, gold=2, kept=5, gold_kept=0)]).p == pytest.approx(1.0)


def test_what_leaves_no_choice_says_nothing():
    full = Removed(chunks=4, gold=1, kept=4, gold_kept=1)
    all_gold = Removed(chunks=4, gold=4, kept=2, gold_kept=2)
    no_gold = Removed(chunks=4, gold=0, kept=2, gold_kept=0)
    assert against_chance([full, all_gold, no_gold]) is None
