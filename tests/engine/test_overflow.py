"""Which chunks are let in when the prompt is too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entroprefill_rag.engine.overflow import admit
from entroprefill_rag.errors import PromptOverflowError


def choose(lengths, limit, *, protected=None, fixed=10, delimiter=1, reserve=0, drop=True):
    return admit(
        lengths,
        protected or [False] * len(lengths),
        fixed=fixed,
        delimiter=delimiter,
        max_positions=limit,
        reserve=reserve,
        drop=drop,
    )


def test_a_prompt_that_just_fits_is_whole():
    assert choose([5, 5, 5], 27, drop=False) == [0, 1, 2]
    assert choose([5, 5, 5], 30, reserve=3, drop=False) == [0, 1, 2]
    assert choose([5, 5, 5], None, drop=False) == [0, 1, 2]


def test_one_token_more_is_refused_with_numbers_and_ways_out():
    with pytest.raises(PromptOverflowError, match=r"27 tokens.*26 positions.*fewer or shorter.*drop_last"):
        choose([5, 5, 5], 26, drop=False)
    with pytest.raises(PromptOverflowError, match=r"4 positions are kept for the answer"):
        choose([5, 5, 5], 30, reserve=4, drop=False)


def test_the_last_chunks_are_left_out():
    assert choose([5, 5, 5], 26) == [0, 1]
    assert choose([5, 5, 5], 20) == [0]


def test_a_chunk_longer_than_the_window_is_left_out_alone():
    assert choose([100, 5, 5], 30) == [1, 2]
    assert choose([100], 30) == []


def test_protected_chunks_are_never_left_out():
    assert choose([5, 5, 5], 21, protected=[False, False, True]) == [0, 2]
    with pytest.raises(PromptOverflowError, match="protected chunks alone"):
        choose([5, 50, 5], 30, protected=[False, True, False])


def test_a_prompt_too_long_without_chunks_is_refused():
    with pytest.raises(PromptOverflowError, match="no chunk at all"):
        choose([5], 9)


def test_empty_chunks_cost_nothing_and_stay():
    assert choose([5, 0, 5, 0], 21, drop=False) == [0, 1, 2, 3]
    assert choose([5, 0, 5, 0], 20) == [0, 1, 3]


@given(
    lengths=st.lists(st.integers(0, 30), max_size=12),
    limit=st.integers(0, 200),
    reserve=st.integers(0, 20),
    data=st.data(),
)
def test_what_is_admitted_fits_and_the_next_would_not(lengths, limit, reserve, data):
    protected = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))

    def total(chosen):
        shown = [lengths[index] for index in chosen if lengths[index]]
        return 10 + sum(shown) + max(0, len(shown) - 1) + reserve

    try:
        admitted = choose(lengths, limit, protected=protected, reserve=reserve)
    except PromptOverflowError:
        assert total([index for index, keep in enumerate(protected) if keep]) > limit
        return
    assert total(admitted) <= limit
    assert admitted == sorted(admitted)
    assert {index for index, keep in enumerate(protected) if keep} <= set(admitted)
    left_out = [
        index for index in range(len(lengths)) if index not in admitted and 10 + lengths[index] + reserve <= limit
    ]
    if left_out:
        assert total(sorted([*admitted, left_out[0]])) > limit
