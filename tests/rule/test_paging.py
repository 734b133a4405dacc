"""A page is freed only when it is wholly empty, in a layer that has a table of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entroprefill_rag.rule.paging import PagesFreed, pages_freed, removed_runs, union_over_heads


def without(tokens: int, *runs: tuple[int, int]) -> list[int]:
    return [place for place in range(tokens) if not any(start <= place < end for start, end in runs)]


def test_the_runs_are_the_maximal_removed_ranges() -> None:
    assert removed_runs([0, 1, 5, 6, 9], 12) == [(2, 5), (7, 9), (10, 12)]
    assert removed_runs(range(4), 4) == []
    assert removed_runs([], 3) == [(0, 3)]


def test_pages_counted_by_hand() -> None:
    # Pages of 16 over 100 tokens: 7 pages. [10, 50) covers pages 1 and 2 whole; [60, 75) covers none.
    kept = without(100, (10, 50), (60, 75))
    # 45 tokens remain: 3 pages.
    assert pages_freed(kept, tokens=100, page=16, layers_above=1) == PagesFreed(compacted=4, in_place=2)
    assert pages_freed(kept, tokens=100, page=16, layers_above=10) == PagesFreed(compacted=40, in_place=20)


def test_one_block_table_for_all_layers_frees_nothing() -> None:
    kept = without(160, (16, 96))
    assert pages_freed(kept, tokens=160, page=16, layers_above=8).in_place == 40
    assert pages_freed(kept, tokens=160, page=16, layers_above=8, block_tables="shared") == PagesFreed(0, 0)


@given(data=st.data(), tokens=st.integers(1, 120), page=st.integers(1, 20))
def test_the_formula_counts_full_pages_without_a_retained_token(data: st.DataObject, tokens: int, page: int) -> None:
    kept = data.draw(st.lists(st.integers(0, tokens - 1), unique=True).map(sorted))
    empty = sum(not any(start <= place < start + page for place in kept) for start in range(0, tokens - page + 1, page))
    freed = pages_freed(kept, tokens=tokens, page=page, layers_above=1)
    assert freed.in_place == empty
    assert freed.compacted == len(range(0, tokens, page)) - len(range(0, len(kept), page))
    assert freed.in_place <= freed.compacted


def test_heads_that_share_storage_keep_what_any_of_them_wants() -> None:
    selected = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]], dtype=bool)
    assert union_over_heads(selected, 2).astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 1, 0]]
    assert union_over_heads(selected, 1).astype(int).tolist() == [[1, 1, 1, 0]]
    assert (union_over_heads(selected, 4) == selected).all()


@pytest.mark.parametrize("kept", [[3, 2], [1, 1], [-1, 2], [4]])
def test_positions_that_are_no_selection_are_refused(kept: list[int]) -> None:
    with pytest.raises(ValueError, match="kept positions"):
        removed_runs(kept, 4)


def test_what_is_no_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="page"):
        pages_freed([0], tokens=2, page=0, layers_above=1)
    with pytest.raises(ValueError, match="block_tables"):
        pages_freed([0], tokens=2, page=1, layers_above=1, block_tables="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple"):
        union_over_heads(np.zeros((3, 4)), 2)
