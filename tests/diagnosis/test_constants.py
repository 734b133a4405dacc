"""Constants from differences written down: who is divided by whom, what counts as noise, what a sink is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entroprefill_rag.diagnosis.constants import fixed_rows, measured_layer, token_distances
from entroprefill_rag.diagnosis.heads import AttentionInputs, HeadRows, read_heads
from entroprefill_rag.diagnosis.lockstep import SideBySide
from entroprefill_rag.diagnosis.paired import LayerStep

EPSILON = 1e-7


def step(layer: int, **numbers: list[float]) -> LayerStep:
    """One head, three retained tokens; what is not given is zero."""
    given = {name: np.array(numbers.get(name, [0.0] * 3)) for name in ("before", "after", "stretched", "added")}
    heads = HeadRows(
        eta=np.array([numbers.get("eta", [0.0] * 3)]),
        change=np.zeros((1, 3)),
        value_norm=np.array([3.0]),
        value_diameter=np.array([4.0]),
    )
    attention = np.array(numbers.get("attention", [0.0] * 3))
    return LayerStep(layer=layer, **given, attention=attention, norms=np.ones(3), size=np.ones(3), heads=heads)


def test_the_token_map_leaves_out_what_rounding_made() -> None:
    noisy = step(1, attention=[1e-8, 0.5, 2.0], added=[1e-3, 1.0, 3.0])
    seen = measured_layer(noisy, np.zeros(1), EPSILON)
    assert (seen.token_map, seen.token_map_rows, seen.rows) == (pytest.approx(2.0), 2, 3)
    nothing = step(1, attention=[1e-8] * 3, added=[1e-3] * 3)
    assert measured_layer(nothing, np.zeros(1), EPSILON).token_map is None


def test_a_layer_before_which_nothing_differed_has_no_stretch() -> None:
    assert measured_layer(step(1, stretched=[0.0] * 3), np.zeros(1), EPSILON).lipschitz is None
    moved = step(2, before=[0.0, 4.0, 1.0], stretched=[0.0, 2.0, 6.0])
    assert measured_layer(moved, np.zeros(1), EPSILON).lipschitz == pytest.approx(1.5)


def test_drift_is_the_largest_over_heads_and_may_be_negative() -> None:
    seen = measured_layer(step(1, eta=[0.1, 0.3, 0.2]), np.array([0.5]), EPSILON)
    assert seen.drift == pytest.approx(-0.2)
    assert seen.eta == pytest.approx((0.3,))


def test_token_by_token_each_row_has_its_own_mass_and_its_own_stretch() -> None:
    first = step(1, attention=[0.0, 0.5, 0.5], added=[0.0, 1.0, 0.25], eta=[0.0, 0.5, 0.25])
    second = step(2, before=[0.0, 1.0, 0.25], stretched=[0.0, 0.5, 2.0])
    both = SideBySide(
        layer=0,
        eta=np.zeros((1, 3)),
        steps=(first, second),
        full_logits=np.zeros(2),
        pruned_logits=np.zeros(2),
        full_last=torch.zeros(1),
        pruned_last=torch.zeros(1),
        epsilon=EPSILON,
    )
    # Layer 1: M (-, 2, .5), diameter 4, masses (0, .5, .25): (0, 4, .5). Layer 2: the largest distance up to each token
    # was (0, 1, 1), so the stretch is (0, .5, 2), on bounds that reach (0, 4, 4).
    assert token_distances(both).tolist() == [[0.0, 4.0, 0.5], [0.0, 2.0, 8.0]]


def test_fixed_rows_count_what_is_beyond_the_bound_and_not_what_rounding_is() -> None:
    heads = HeadRows(
        eta=np.array([[0.5, 0.5, 0.0, 0.5]]),
        change=np.array([[2.9, 3.1, 1e-6, 1.0]]),
        value_norm=np.array([3.0]),
        value_diameter=np.array([4.0]),
    )
    rows = [np.zeros(4)] * 7
    found = fixed_rows(LayerStep(1, *rows, heads=heads))
    assert (found.rows, found.violations, found.diameter_violations) == (4, 1, 2)
    assert found.tightest == pytest.approx(3.1 / 3.0)
    assert found.median == pytest.approx(2.9 / 3.0)
    assert found.diameter_tightest == pytest.approx(3.1 / 2.0)


def inputs(sinks: torch.Tensor | None) -> AttentionInputs:
    """One head, two keys with equal logits and values 1 and -1."""
    keys = torch.zeros(1, 1, 2, 1)
    values = torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1)
    return AttentionInputs(keys, keys, values, None, {"scaling": 1.0, "s_aux": sinks})


def test_two_keys_with_opposite_values_attain_the_factor_2() -> None:
    heads = read_heads(inputs(None), torch.tensor([1]), torch.ones(1, 1, 1), window=None)
    assert heads.eta.tolist() == [[pytest.approx(0.5)]]
    assert heads.change.tolist() == [[pytest.approx(1.0)]]
    assert heads.value_norm.tolist() == [1.0]
    assert heads.value_diameter.tolist() == [pytest.approx(2.0)]


def test_a_learned_sink_takes_its_share_and_is_a_value_of_zero() -> None:
    values = torch.tensor([1.0, 1.0]).reshape(1, 1, 2, 1)
    given = inputs(torch.zeros(1))
    given = AttentionInputs(given.query, given.key, values, None, given.kwargs)
    heads = read_heads(given, torch.tensor([1]), torch.ones(1, 1, 1), window=None)
    # Thirds; without the removed key, halves: 2/3 becomes 1/2 although both values are 1.
    assert heads.eta.tolist() == [[pytest.approx(1 / 3)]]
    assert heads.change.tolist() == [[pytest.approx(1 / 6)]]
    assert heads.value_diameter.tolist() == [pytest.approx(1.0)]


def test_a_window_without_a_mask_is_respected() -> None:
    keys = torch.zeros(1, 1, 4, 1)
    given = AttentionInputs(keys, keys, torch.ones(1, 1, 4, 1), None, {"scaling": 1.0})
    masses = [read_heads(given, torch.tensor([1, 2, 3]), None, window=window).eta[0] for window in (None, 3)]
    assert masses[0].tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 4])
    assert masses[1].tolist() == pytest.approx([1 / 2, 1 / 3, 0.0])
