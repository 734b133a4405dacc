"""Recall and AUC over padded batches, against direct counting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entroprefill_rag.calibration.ranking import Batch, auc, interval, pooled, recall, stack


def batch_of(sizes, seed):
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, 50, size) for size in sizes]
    gold = [sorted(rng.choice(size, rng.integers(1, size), replace=False).tolist()) for size in sizes]
    return Batch.of(tokens, gold), tokens, gold, rng


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(2, 7), min_size=1, max_size=5), st.integers(0, 2**31), st.sampled_from([0.25, 0.5]))
def test_recall_and_auc_are_what_counting_gives(sizes, seed, share):
    batch, tokens, gold, rng = batch_of(sizes, seed)
    masses = [rng.integers(0, 3, (2, size)).astype(float) for size in sizes]
    scores = pooled(stack(masses, batch), np.array([0.3, 0.7]), batch)
    kept, won = recall(scores, batch, share), auc(scores, batch)
    for q, size in enumerate(sizes):
        mine = [(0.3 * masses[q][0, i] + 0.7 * masses[q][1, i]) / tokens[q][i] for i in range(size)]
        assert scores[q, :size] == pytest.approx(mine)
        best = sorted(range(size), key=lambda i: (-scores[q, i], i))[: int(np.ceil(share * size))]
        assert kept[q] == pytest.approx(len(set(best) & set(gold[q])) / len(gold[q]))
        pairs = [(scores[q, g], scores[q, o]) for g in gold[q] for o in range(size) if o not in gold[q]]
        assert won[q] == pytest.approx(np.mean([(a > b) + 0.5 * (a == b) for a, b in pairs]))


def test_padding_is_never_kept():
    batch = Batch.of([np.array([5, 5]), np.array([5] * 8)], [[1], [0]])
    scores = pooled(stack([np.zeros((1, 2)), np.zeros((1, 8))], batch), np.ones(1), batch)
    assert recall(scores, batch, 0.5).tolist() == [0.0, 1.0]
    assert batch.kept(0.25).tolist() == [1, 2]
    assert batch.chance(0.5) == 0.5


def test_a_question_with_gold_chunks_only_has_nothing_to_compare():
    batch = Batch.of([np.array([5, 5])], [[0, 1]])
    assert auc(np.array([[1.0, 2.0]]), batch).tolist() == [0.5]


def test_an_interval_holds_its_mean_and_shrinks_with_more_questions():
    rng = np.random.default_rng(0)
    few, many = rng.random(10), rng.random(1000)
    for values in (few, many):
        mean, low, high = interval(values, np.random.default_rng(1))
        assert low <= mean <= high
    assert np.subtract(*interval(many, rng)[:0:-1]) < np.subtract(*interval(few, rng)[:0:-1])
