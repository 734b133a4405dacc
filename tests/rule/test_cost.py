"""Costs are those counted by hand, or by loops over every row and key."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entroprefill_rag.rule.cost import (
    ModelShape,
    attention_pairs,
    break_even_kept,
    expected_gain,
    gather_bytes,
    kv_bytes_per_layer,
    predicted_speedup,
    prefill_flops,
    scoring_bytes,
    scoring_flops,
    spread_evenly,
    transfer_bytes,
)

TINY = ModelShape(
    layers=3, hidden=8, intermediate=16, query_heads=4, kv_heads=2, head_dim=2, vocab=10, bytes_per_value=2
)
# SmolLM2-135M.
SMOL = ModelShape(layers=30, hidden=576, intermediate=1536, query_heads=9, kv_heads=3, head_dim=64, vocab=49152)


def test_the_operations_of_a_tiny_model_counted_by_hand() -> None:
    # Per token: q 8x8, k and v 8x4 each, o 8x8 = 192 multiply-adds; gate, up, down 3 * 8 * 16 = 384. Twice 576.
    assert TINY.linear_flops == 1152
    # Per pair and head: 2 multiply-adds for the score, 2 for the value, 4 heads.
    assert TINY.pair_flops == 32
    # 5 tokens: 15 pairs. (1152 * 5 + 32 * 15) * 3 layers + 2 * 8 * 10.
    assert prefill_flops(TINY, 5) == 3 * 6240 + 160
    # Kept 3 of 5 above layer 0: 6 pairs.
    assert prefill_flops(TINY, 5, [0, 2, 4], 0) == 6240 + 2 * (1152 * 3 + 32 * 6) + 160
    assert replace(TINY, gated_mlp=False).linear_flops == 2 * (192 + 256)


def test_the_linear_part_counts_every_weight_of_a_known_model_once() -> None:
    """SmolLM2-135M has 106.2 million weights in its layers, less the norms."""
    assert SMOL.layers * SMOL.linear_flops / 2 == 106_168_320


def test_keeping_everything_costs_a_full_prefill() -> None:
    assert prefill_flops(TINY, 50, np.arange(50), 1) == prefill_flops(TINY, 50)


@given(data=st.data(), tokens=st.integers(1, 60), window=st.none() | st.integers(1, 70))
def test_pairs_are_those_that_a_loop_over_rows_and_keys_counts(
    data: st.DataObject, tokens: int, window: int | None
) -> None:
    kept = data.draw(st.lists(st.integers(0, tokens - 1), unique=True).map(sorted))
    counted = sum(key <= row and (window is None or row - key < window) for row in kept for key in kept)
    assert attention_pairs(kept, window) == counted


def test_windowed_layers_see_fewer_pairs() -> None:
    windowed = replace(TINY, windows=(None, 4, 4))
    saved = prefill_flops(TINY, 100) - prefill_flops(windowed, 100)
    assert saved == 2 * 32 * (5050 - attention_pairs(range(100), 4))


def test_the_cost_of_looking() -> None:
    # 2 layers, 4 heads, 6 rows, 100 keys, 2 multiply-adds each.
    assert scoring_flops(TINY, monitored=2, rows=6, tokens=100) == 2 * 2 * 4 * 6 * 100 * 2
    assert scoring_bytes(TINY, rows=6, tokens=100) == 4 * 4 * 6 * 100
    assert gather_bytes(TINY, 30) == 2 * 30 * 8 * 2


def test_memory_by_layer_and_on_the_wire() -> None:
    # Per token and layer: key and value, 2 heads, 2 wide, 2 bytes = 16.
    assert kv_bytes_per_layer(TINY, tokens=100, kept=40, layer=0) == (1600, 640, 640)
    assert kv_bytes_per_layer(TINY, tokens=100, kept=40, layer=2) == (1600, 1600, 1600)
    assert transfer_bytes(TINY, tokens=100, kept=40, layer=0) == 2880


@pytest.mark.parametrize("layer", [4, 12, 20])
@pytest.mark.parametrize("monitored", [1, 6])
def test_break_even_is_the_last_count_that_pays(layer: int, monitored: int) -> None:
    tokens = 2048
    overhead = scoring_flops(SMOL, monitored=monitored, rows=144, tokens=tokens)
    kept = break_even_kept(SMOL, tokens=tokens, layer=layer, overhead=overhead)
    assert kept is not None
    full = prefill_flops(SMOL, tokens)
    assert prefill_flops(SMOL, tokens, spread_evenly(tokens, kept), layer) + overhead <= full
    assert prefill_flops(SMOL, tokens, spread_evenly(tokens, kept + 1), layer) + overhead > full


def test_break_even_at_its_ends() -> None:
    assert break_even_kept(TINY, tokens=20, layer=0, overhead=0) == 20
    assert break_even_kept(TINY, tokens=20, layer=0, overhead=prefill_flops(TINY, 20)) is None


def test_the_speedup_is_the_ratio_of_what_is_done() -> None:
    kept = [0, 2, 4]
    assert predicted_speedup(TINY, tokens=5, kept=kept, layer=0, overhead=0) == pytest.approx(18880 / 13696)
    slower = predicted_speedup(TINY, tokens=5, kept=kept, layer=0, overhead=1000)
    assert slower == pytest.approx(18880 / 14696)
    fixed = predicted_speedup(
        TINY, tokens=5, kept=kept, layer=0, overhead=1000, flops_per_second=1e6, fixed_seconds=0.01
    )
    assert fixed == pytest.approx(18880 / 24696)


@pytest.mark.parametrize(("layer", "measured"), [(4, 3.4), (8, 2.3), (12, 1.9)])
def test_the_prediction_is_near_what_was_measured_on_a_processor(layer: int, measured: float) -> None:
    """SmolLM2, 4,096 tokens, a quarter kept, two cores, bfloat16: 5.27 s in full."""
    predicted = predicted_speedup(SMOL, tokens=4096, kept=spread_evenly(4096, 1024), layer=layer, overhead=0)
    assert predicted == pytest.approx(measured, rel=0.25)


def test_a_gain_that_comes_seldom_may_not_pay_for_looking_always() -> None:
    assert expected_gain(0.5, 10.0, 2.0) == pytest.approx(3.0)
    assert expected_gain(0.1, 10.0, 2.0) == pytest.approx(-1.0)
    assert expected_gain(0.5, 10.0, 2.0, overhead_on_bypass=4.0) == pytest.approx(2.0)


def test_evenly_spread_positions_are_distinct_and_inside() -> None:
    for kept in (1, 7, 99, 100):
        places = spread_evenly(100, kept)
        assert len(set(places.tolist())) == kept
        assert 0 <= places.min() <= places.max() < 100


def test_what_is_no_model_or_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        replace(TINY, kv_heads=0)
    with pytest.raises(ValueError, match="windows"):
        replace(TINY, windows=(None,))
    with pytest.raises(ValueError, match="both"):
        prefill_flops(TINY, 5, [0, 1])
    with pytest.raises(ValueError, match="layer 3"):
        prefill_flops(TINY, 5, [0, 1], 3)
    with pytest.raises(ValueError, match="kept"):
        spread_evenly(10, 11)
    with pytest.raises(ValueError, match="flops_per_second"):
        predicted_speedup(TINY, tokens=5, kept=[0], layer=0, overhead=0, fixed_seconds=0.1)
