"""Every method that ranks chunks keeps as much, by the rule's own way of removing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entroprefill_rag import PruningConfig
from entroprefill_rag.bench.budget import kept_within, savings


def test_half_is_what_the_defaults_say():
    default = PruningConfig()
    assert savings(0.5) == {name: getattr(default, name) for name in ("min_saving", "target_saving", "max_saving")}


@given(
    tokens=st.lists(st.integers(1, 300), min_size=3, max_size=30),
    budget=st.floats(0.1, 0.9),
    seed=st.integers(0, 1000),
)
def test_no_more_than_the_budget_stays_unless_a_limit_says_so(tokens, budget, seed):
    scores = np.random.default_rng(seed).random(len(tokens))
    kept = kept_within(scores, tokens, budget)
    left, total = sum(tokens[i] for i in kept), sum(tokens)
    assert len(kept) >= PruningConfig().m0
    assert left >= total * (1 - savings(budget)["max_saving"]) - 1
    gone = set(range(len(tokens))) - set(kept)
    if left > budget * total + 1 and len(kept) > PruningConfig().m0:
        most = savings(budget)["max_saving"] * total
        assert all(total - left + tokens[i] > most - 1 for i in kept)
    assert all(0 <= i < len(tokens) for i in gone)


def test_the_lowest_go_first():
    assert kept_within([4, 1, 3, 2], [10, 10, 10, 10], 0.5) == (0, 2)


@pytest.mark.parametrize("budget", [0.1, 0.25, 0.5, 0.9])
def test_the_settings_of_a_budget_are_a_configuration(budget):
    assert PruningConfig(**savings(budget)).target_saving == pytest.approx(1 - budget)
