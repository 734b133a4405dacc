"""What removed tokens free in a paged KV cache, and what selections made per head leave of it (section 9).

A saving in tokens is not yet a saving in pages: pages are freed whole, layers up to the accepted one keep every
token, and heads that share storage keep the union of what each of them selects (correction 11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class PagesFreed:
    """Pages of the KV cache freed by one request, over all layers.

    Attributes:
        compacted: if the retained tokens are moved together.
        in_place: if they stay where they are, so that only wholly empty pages go.
    """

    compacted: int
    in_place: int


def removed_runs(kept: ArrayLike, tokens: int) -> list[tuple[int, int]]:
    """Maximal half-open ranges of removed positions.

    Args:
        kept: ascending positions retained.
        tokens: length of the prompt [n].

    Raises:
        ValueError: positions that do not ascend or lie outside the prompt.
    """
    places = np.asarray(kept, dtype=np.int64)
    edges = np.concatenate([[-1], places, [tokens]])
    if (np.diff(edges) < 1).any():
        raise ValueError(f"kept positions must ascend without repeats and lie in [0, {tokens})")
    gaps = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[gap]) + 1, int(edges[gap + 1])) for gap in gaps]


def pages_freed(
    kept: ArrayLike,
    *,
    tokens: int,
    page: int,
    layers_above: int,
    block_tables: Literal["per_layer", "shared"] = "per_layer",
) -> PagesFreed:
    """Pages freed in the layers above the accepted one.

    In place, ``sum max(0, floor(e / B) - ceil(s / B))`` over maximal removed runs ``[s, e)``: only full pages count,
    and the last, partly filled page holds the protected suffix anyway.

    Args:
        kept: ascending positions retained.
        tokens: length of the prompt [n].
        page: tokens in a page [B].
        layers_above: layers that hold the retained tokens only.
        block_tables: ``"shared"``: one table addresses all layers, so the full layers pin every page and none is freed.

    Raises:
        ValueError: positions that are no selection, a page below one, negative layers, unknown tables.
    """
    runs = removed_runs(kept, tokens)
    if page < 1 or layers_above < 0 or block_tables not in ("per_layer", "shared"):
        raise ValueError(
            f"need page >= 1, layers_above >= 0 and block_tables 'per_layer' or 'shared', got {page}, {layers_above} "
            f"and {block_tables!r}"
        )
    if block_tables == "shared":
        return PagesFreed(0, 0)
    retained = tokens - sum(end - start for start, end in runs)
    in_place = sum(max(0, end // page - -(-start // page)) for start, end in runs)
    compacted = -(-tokens // page) - -(-retained // page)
    return PagesFreed(compacted * layers_above, in_place * layers_above)


def union_over_heads(selected: ArrayLike, groups: int) -> NDArray[np.bool_]:
    """Tokens that must stay where selections are made per query head: whatever any head of a group wants.

    Args:
        selected: ``[H_Q, n]``, True where the query head wants the token kept.
        groups: sets of heads that share storage: the GQA groups [G], or 1 where pages hold all KV heads.

    Returns:
        ``[groups, n]``.

    Raises:
        ValueError: heads that do not divide into groups.
    """
    wanted = np.asarray(selected, dtype=bool)
    if wanted.ndim != 2 or groups < 1 or wanted.shape[0] % groups:
        raise ValueError(f"selections must be [heads, tokens], heads a multiple of {groups}, got {wanted.shape}")
    return np.asarray(wanted.reshape(groups, -1, wanted.shape[1]).any(axis=1))
