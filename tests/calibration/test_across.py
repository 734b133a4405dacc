"""Heads of several layers that rank chunks together: found where planted, in every form, held out honestly."""

import numpy as np
import pytest

from entroprefill_rag.calibration.across import best, held_out_across, in_every_form, pick_across
from entroprefill_rag.calibration.fit import fit
from entroprefill_rag.calibration.heads import folds_of
from entroprefill_rag.calibration.ranking import Batch, auc, head_auc, stack

CHUNKS, HEADS = 8, 12


def questions(count, seed, signal):
    """Shares of heads of which those in ``signal`` see more of the gold chunk in the forms named there."""
    rng = np.random.default_rng(seed)
    forms = ["asked" if i % 2 else "topic" for i in range(count)]
    gold = rng.integers(CHUNKS, size=count)
    batch = Batch.of([np.full(CHUNKS, 50)] * count, [[int(one)] for one in gold])
    masses = rng.dirichlet(np.ones(CHUNKS), (count, HEADS))
    for head, where in signal.items():
        for q in range(count):
            if forms[q] in where:
                masses[q, head, gold[q]] += 0.4
    masses /= masses.sum(axis=2, keepdims=True)
    return stack(list(masses), batch), batch, forms, folds_of(np.arange(count), 5, rng), rng


def test_a_head_counts_as_much_as_in_the_form_where_it_does_worst():
    by_head = np.array([[1.0, 0.8], [1.0, 0.8], [0.5, 0.7]])
    assert in_every_form(by_head, ["a", "a", "b"]) == pytest.approx([0.5, 0.7])
    assert best(by_head, ["a", "a", "b"], 1).tolist() == [0.0, 1.0]
    assert best(by_head, ["a", "a", "b"], 2).tolist() == [0.5, 0.5]


def test_heads_good_in_every_form_are_picked_and_one_good_in_one_form_is_not():
    shares, batch, forms, fold, _ = questions(80, 0, {2: {"asked", "topic"}, 7: {"asked", "topic"}, 9: {"asked"}})
    v = pick_across(shares, head_auc(shares, batch), batch, fold, forms)
    assert set(np.flatnonzero(v)) <= {2, 7}
    assert v.sum() == pytest.approx(1.0)


def test_held_out_order_of_noise_is_at_chance():
    found = []
    for seed in range(10):
        shares, batch, forms, fold, rng = questions(30, seed, {})
        found.append(auc(held_out_across(shares, head_auc(shares, batch), batch, fold, forms, rng), batch).mean())
    assert abs(np.mean(found) - 0.5) < 0.04


def test_hard_questions_are_measured_and_pick_nothing():
    from test_fit import INFO, planted

    easy, hard = planted(40, 0, signal={2: 0.3}), planted(12, 1, signal={1: 0.5})
    forms = ["asked"] * 40 + ["removed"] * 12
    with_hard = fit([*easy, *hard], forms, list(range(52)), INFO, source="packaged")
    without = fit(easy, ["asked"] * 40, list(range(40)), INFO, source="packaged")
    assert with_hard.pooled == without.pooled
    assert with_hard.layers == without.layers
    assert (with_hard.training.questions, with_hard.training.hard) == (40, 12)
    assert with_hard.evidence[1].hard.n == 12
    assert without.evidence[1].hard is None
