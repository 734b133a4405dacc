"""A plan is what the cost and paging functions say, put together; its edges are those of what it plans."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entroprefill_rag.rule.cost import ModelShape, prefill_flops, scoring_flops
from entroprefill_rag.rule.plan import kept_positions, plan_prefill

SMOL = ModelShape(layers=30, hidden=576, intermediate=1536, query_heads=9, kv_heads=3, head_dim=64, vocab=49152)


def plan(keep: float = 0.5, **more: object):  # type: ignore[no-untyped-def]
    kept = kept_positions(4096, keep=keep, chunks=20, other=96)
    return plan_prefill(SMOL, **{"tokens": 4096, "layer": 14, "kept": kept, **more})  # type: ignore[arg-type]


@given(tokens=st.integers(1, 3000), keep=st.floats(0, 1), chunks=st.integers(1, 60), other=st.integers(0, 200))
def test_whole_chunks_go_and_what_is_no_chunks_stays(tokens: int, keep: float, chunks: int, other: int) -> None:
    if tokens - other < chunks:
        with pytest.raises(ValueError, match="at least one token a chunk"):
            kept_positions(tokens, keep=keep, chunks=chunks, other=other)
        return
    kept = np.isin(np.arange(tokens), kept_positions(tokens, keep=keep, chunks=chunks, other=other))
    before, block = other // 2, tokens - other
    assert kept[:before].all()
    assert kept[before + block :].all()
    edges = before + block * np.arange(chunks + 1) // chunks
    parts = [kept[start:end] for start, end in pairwise(edges)]
    assert all(part.all() or not part.any() for part in parts)
    assert sum(bool(part.all()) for part in parts) == round(chunks * keep)


def test_the_figures_of_a_plan_by_hand() -> None:
    found = plan(page=16, bytes_per_second=1e9, flops_per_second=1e12)
    kept = found.kept_tokens
    assert kept == 96 + 2000
    assert found.full_flops == prefill_flops(SMOL, 4096)
    # 8 layers, 9 heads, 16 rows, 4096 keys, 64 multiply-adds.
    assert found.scoring_flops == 2 * 8 * 9 * 16 * 4096 * 64
    # keys and values of 3 heads of 64, two bytes each.
    assert found.kv_bytes_per_layer == (768 * 4096, 768 * kept)
    assert found.kv_bytes == (30 * 768 * 4096, 15 * 768 * 4096 + 15 * 768 * kept)
    assert found.transfer_bytes == found.kv_bytes
    assert found.transfer_seconds == (found.kv_bytes[0] / 1e9, found.kv_bytes[1] / 1e9)
    assert found.prefill_seconds == (found.full_flops / 1e12, found.pruned_flops / 1e12)
    assert found.pages == 30 * 256
    assert found.pages_freed_compacted == 15 * (256 - 131)
    # Ten gaps of 200 tokens, none of which begins at a page's edge more than twice: 11 or 12 whole pages in each.
    assert 15 * 10 * 11 <= found.pages_freed_in_place <= 15 * 10 * 12
    assert found.pages_freed_shared_table == 0
    assert found.speedup == found.full_flops / found.pruned_flops


def test_what_is_never_accepted_costs_what_looking_costs() -> None:
    never, always = plan(accept_rate=0.0), plan(accept_rate=1.0)
    looking = scoring_flops(SMOL, monitored=8, rows=16, tokens=4096)
    assert never.expected_speedup == pytest.approx(never.full_flops / (never.full_flops + looking))
    assert always.expected_speedup == pytest.approx(always.speedup)
    even = plan(accept_rate=always.break_even_accept_rate)
    assert even.expected_speedup == pytest.approx(1.0)


def test_keeping_the_break_even_share_costs_no_more_and_one_token_more_does() -> None:
    share = plan(monitored=200, rows=400).break_even_kept_share
    assert share is not None
    most = round(share * 4096)

    def cost(kept: int) -> int:
        spread = np.arange(kept) * 4096 // kept
        looking = scoring_flops(SMOL, monitored=200, rows=400, tokens=4096)
        return prefill_flops(SMOL, 4096, spread, 14) + looking

    assert cost(most) <= prefill_flops(SMOL, 4096) < cost(most + 1)


def test_keeping_everything_never_pays() -> None:
    found = plan(keep=1.0)
    assert found.speedup < 1.0
    assert found.break_even_accept_rate is None
    assert found.pages_freed_compacted == found.pages_freed_in_place == 0


@pytest.mark.parametrize("more", [{"accept_rate": 1.2}, {"bytes_per_second": 0.0}, {"layer": 30}, {"page": 0}])
def test_what_cannot_be_planned_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        plan(**more)
