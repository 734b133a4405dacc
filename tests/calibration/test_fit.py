"""Fitting: planted heads are found, noise is not taken for signal, and what is written is sound."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from profile_cases import profile

from entroprefill_rag.calibration.fit import choose_layers, fit
from entroprefill_rag.calibration.heads import counts_of, floored, folds_of, held_out, pick, top
from entroprefill_rag.calibration.measure import Measured
from entroprefill_rag.calibration.profile import CapCurve, Estimate, LayerEvidence, ModelProfile
from entroprefill_rag.calibration.ranking import Batch, auc, head_auc, stack
from entroprefill_rag.errors import ProfileError
from entroprefill_rag.record import ModelInfo

HEADS, CHUNKS, ROWS = 6, 10, 4
INFO = ModelInfo(
    name="planted",
    family="llama",
    dtype="float32",
    device="cpu",
    kernel="sdpa",
    layers=8,
    query_heads=HEADS,
    kv_heads=2,
    fingerprint="0" * 16,
)


def planted(count, seed, *, signal, layers=(1, 2, 3)):
    """Questions whose gold chunk gets more of head 4's attention, at the layers in ``signal``."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        gold = int(rng.integers(CHUNKS))
        masses = []
        for layer in layers:
            mass = rng.dirichlet(np.ones(CHUNKS), (HEADS, ROWS)) * 0.5
            if layer in signal:
                mass[4, :, gold] += signal[layer]
            masses.append(mass)
        made.append(
            Measured(
                layers=layers,
                masses=tuple(masses),
                question=tuple(mass.mean(axis=1) for mass in masses),
                before=tuple(np.zeros((HEADS, CHUNKS)) for _ in layers),
                entropy=rng.uniform(1, 4, (len(layers), HEADS)),
                tokens=np.full(CHUNKS, 50),
                removable=np.ones(CHUNKS, dtype=bool),
                gold=(gold,),
                n_tokens=600,
            )
        )
    return made


def fitted(measured, **more):
    count = len(measured)
    return fit(measured, ["asked"] * count, list(range(count)), INFO, source="packaged", **more)


def at(found, layer):
    return next(one for one in found.evidence if one.layer == layer)


def test_a_planted_head_is_found_and_no_layer_before_it_monitored():
    found = fitted(planted(60, 0, signal={2: 0.06}))
    assert found.layers[0] == 2
    assert dict(found.pooled)[2] == ((2, 4, 1.0),)
    assert at(found, 2).heads == 1
    assert dict(found.weights)[2] == (0, 0, 0, 0, 1.0, 0)
    assert at(found, 2).profile.mean > at(found, 2).uniform.mean + 0.1


def test_a_head_planted_earlier_ranks_the_chunks_at_later_layers():
    found = fitted(planted(60, 0, signal={1: 0.06}))
    heads = dict(found.pooled)
    assert heads[1] == heads[2] == heads[3] == ((1, 4, 1.0),)
    assert at(found, 3).profile.mean < at(found, 3).pooled.mean - 0.1
    assert at(found, 3).pooled.mean == pytest.approx(at(found, 1).pooled.mean, abs=0.1)


def test_a_head_that_looks_so_before_the_question_too_is_not_taken_for_one_that_finds():
    measured = planted(60, 0, signal={1: 0.3, 2: 0.06})
    habit = [replace(one, before=(one.question[0], *one.before[1:])) for one in measured]
    assert dict(fitted(measured).pooled)[2] == ((1, 4, 1.0),)
    found = fitted(habit)
    assert dict(found.pooled)[2] == ((2, 4, 1.0),)
    assert at(found, 1).pooled_auc == pytest.approx(0.5, abs=0.1)


def test_the_same_questions_and_seed_give_the_same_profile():
    measured = planted(40, 1, signal={2: 0.3})
    assert fitted(measured, seed=2) == fitted(measured, seed=2)


@pytest.mark.slow
def test_noise_is_not_taken_for_signal():
    refused, above = 0, []
    for seed in range(10):
        measured = planted(40, seed, signal={})
        try:
            found = fitted(measured, seed=seed)
        except ProfileError:  # no layer is better than chance
            refused += 1
            continue
        above += [one.pooled_auc for one in found.evidence]
    # Three layers, each with its interval above chance in about 2.5% of cases.
    assert refused >= 7


def test_held_out_numbers_of_noise_are_at_chance_and_those_in_sample_are_not():
    # The reason for cross-validation: the best of many useless heads looks useful where it was chosen.
    inside, outside = [], []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        count = 25
        batch = Batch.of([np.full(CHUNKS, 50)] * count, [[int(rng.integers(CHUNKS))] for _ in range(count)])
        masses = stack([rng.dirichlet(np.ones(CHUNKS), 16) for _ in range(count)], batch)
        by_head = head_auc(masses, batch)
        fold = folds_of(np.arange(count), 5, rng)
        inside.append(by_head.mean(axis=0).max())
        outside.append(auc(held_out(masses, by_head, batch, fold, rng, zeta=0.1), batch).mean())
    assert np.mean(inside) > 0.58
    assert abs(np.mean(outside) - 0.5) < 0.03


def test_where_all_heads_are_alike_all_of_them_are_kept():
    rng = np.random.default_rng(0)
    count = 40
    gold = rng.integers(CHUNKS, size=count)
    masses = rng.dirichlet(np.ones(CHUNKS), (count, HEADS))
    masses[np.arange(count), :, gold] += 0.08
    batch = Batch.of([np.full(CHUNKS, 50)] * count, [[int(one)] for one in gold])
    _, n = pick(masses, head_auc(masses, batch), batch, folds_of(np.arange(count), 5, rng), zeta=0.1)
    assert n == HEADS


def test_questions_of_a_group_share_a_fold():
    groups = np.repeat(np.arange(9), 3)
    fold = folds_of(groups, 4, np.random.default_rng(0))
    assert all(len(set(fold[groups == group].tolist())) == 1 for group in range(9))
    assert set(fold.tolist()) == {0, 1, 2, 3}


def test_weights_are_even_shares_floored():
    v = top(np.array([[0.9, 0.1, 0.8, 0.2]]), 2)
    assert v.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert floored(v, 0.2) == pytest.approx([0.45, 0.05, 0.45, 0.05])
    assert counts_of(4) == (1, 2, 3, 4)
    assert counts_of(9) == (1, 2, 3, 4, 6, 8, 9)


def evidence(layer, mean, *, saved=0.4, low=None):
    told = Estimate(mean=mean, low=mean - 0.1 if low is None else low, high=min(1.0, mean + 0.1), n=50)
    return LayerEvidence(
        layer=layer,
        doc_mass=0.3,
        doc_mass_low=0.2,
        uniform=told,
        renyi=told,
        profile=told,
        pooled=told,
        uniform_auc=0.5,
        profile_auc=0.5,
        pooled_auc=mean,
        head_auc=(),
        head_mass=(),
        heads=1,
        v=(),
        caps=(CapCurve(cap=0.2, saved=saved, gold_kept=0.9),),
    )


def test_layers_far_behind_the_best_are_not_monitored():
    assert choose_layers([evidence(5, 0.6), evidence(6, 0.87), evidence(7, 0.9)], 0.25, 20) == (6, 7)


def test_where_nearly_all_is_found_the_rest_tells_layers_apart():
    assert choose_layers([evidence(5, 0.993), evidence(6, 0.998), evidence(7, 0.999)], 0.25, 20) == (6, 7)


def test_a_layer_whose_interval_reaches_chance_is_not_monitored():
    assert choose_layers([evidence(5, 0.9, low=0.2), evidence(6, 0.9)], 0.25, 20) == (6,)


def test_a_layer_that_a_later_one_beats_in_work_saved_is_left_out():
    late = evidence(9, 0.9, saved=0.5)
    assert choose_layers([evidence(5, 0.88, saved=0.15), late], 0.25, 20) == (9,)
    assert choose_layers([evidence(5, 0.88, saved=0.4), late], 0.25, 20) == (5, 9)


def test_a_layer_that_looks_at_sinks_counts_only_where_all_do():
    sinks = evidence(5, 0.9).model_copy(update={"doc_mass": 0.04})
    assert choose_layers([sinks, evidence(6, 0.88)], 0.25, 20) == (6,)
    assert choose_layers([sinks], 0.25, 20) == (5,)


def test_the_top_of_the_stack_counts_only_where_nothing_else_does():
    assert choose_layers([evidence(8, 0.7), evidence(17, 0.95)], 0.25, 20) == (8,)
    assert choose_layers([evidence(8, 0.3, low=0.2), evidence(17, 0.95)], 0.25, 20) == (17,)


def test_at_most_five_layers_are_monitored():
    assert choose_layers([evidence(layer, 0.9) for layer in range(3, 13)], 0.25, 20) == (3, 4, 5, 6, 7)


def test_too_few_questions_are_refused():
    with pytest.raises(ProfileError, match="too few"):
        fitted(planted(10, 0, signal={2: 0.3}))
    measured = planted(30, 0, signal={2: 0.3})
    with pytest.raises(ProfileError, match="too few"):
        fit(measured, ["asked"] * 30, [0] * 30, INFO, source="packaged")


def test_a_prompt_that_shows_other_layers_is_left_out():
    odd = planted(1, 9, signal={}, layers=(1, 2))
    found = fitted([*planted(30, 0, signal={2: 0.3}), *odd])
    assert found.training.questions == 30


def test_thresholds_let_the_monitored_layers_through():
    measured = planted(60, 0, signal={2: 0.3})
    found = fitted(measured)
    place = measured[0].layers.index(2)
    mass = [one.masses[place].mean(axis=1).sum(axis=-1).mean() for one in measured]
    assert found.mass_min < min(mass)
    assert found.mu_min < min(one.excess()[1][place, 4] for one in measured)


def test_caps_allow_more_the_higher_they_are():
    curves = at(fitted(planted(40, 0, signal={2: 0.3})), 2).caps
    assert [one.cap for one in curves] == [0.1, 0.2, 0.3, 0.5]
    assert all(one.saved <= other.saved + 1e-9 for one, other in pairwise(curves))
    found = fitted(planted(40, 0, signal={2: 0.3})).caps
    assert found["0.25"] <= found["0.5"]


def test_what_is_fitted_survives_json():
    found = fitted(planted(40, 0, signal={2: 0.3}))
    assert ModelProfile.model_validate_json(found.to_json()) == found
    assert found.name != profile().name
