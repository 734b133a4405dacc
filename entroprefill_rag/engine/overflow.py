"""Which chunks are let into a prompt that may be too long for the model."""

from __future__ import annotations

from collections.abc import Sequence

from entroprefill_rag.errors import PromptOverflowError


def admit(
    lengths: Sequence[int],
    protected: Sequence[bool],
    *,
    fixed: int,
    delimiter: int,
    max_positions: int | None,
    reserve: int,
    drop: bool,
) -> list[int]:
    """Choose the chunks that go into the prompt.

    Chunks that could not fit even alone are left out first, then chunks from the last one on. A chunk that the caller
    protects is never left out.

    Args:
        lengths: tokens of each chunk.
        protected: per chunk, whether the caller protects it.
        fixed: tokens of prefix and suffix.
        delimiter: tokens between two chunks.
        max_positions: most tokens the model can place; None for no limit.
        reserve: positions to leave free for generated tokens.
        drop: leave chunks out rather than raise.

    Returns:
        Positions of the admitted chunks, ascending.

    Raises:
        PromptOverflowError: the prompt does not fit, and may not or cannot be made to.
    """
    everything = list(range(len(lengths)))
    if max_positions is None:
        return everything
    room = max_positions - reserve
    if (total := _total(lengths, everything, fixed, delimiter)) <= room:
        return everything
    if not drop:
        raise PromptOverflowError(
            f"{_need(total, reserve, max_positions)}; pass fewer or shorter chunks, ask for fewer new tokens, or set "
            "overflow='drop_last' to leave out the last chunks"
        )
    admitted = [index for index in everything if protected[index] or fixed + lengths[index] <= room]
    total = _total(lengths, admitted, fixed, delimiter)
    for index in reversed(list(admitted)):
        if total <= room:
            break
        if lengths[index] and not protected[index]:
            admitted.remove(index)
            total = _total(lengths, admitted, fixed, delimiter)
    if total > room:
        left = "its protected chunks alone" if any(lengths[index] for index in admitted) else "no chunk at all"
        raise PromptOverflowError(
            f"with {left}, {_need(total, reserve, max_positions)}; shorten instruction, history, query or protected "
            "chunks, or ask for fewer new tokens"
        )
    return admitted


def _total(lengths: Sequence[int], admitted: Sequence[int], fixed: int, delimiter: int) -> int:
    shown = [lengths[index] for index in admitted if lengths[index]]
    return fixed + sum(shown) + delimiter * max(0, len(shown) - 1)


def _need(total: int, reserve: int, max_positions: int) -> str:
    wanted = f"the prompt has {total:,} tokens"
    if reserve:
        wanted += f" and {reserve:,} positions are kept for the answer"
    return f"{wanted}, but the model has {max_positions:,} positions"
