"""Does it pay, before any run: everything of section 9 for one prompt length, layer and kept share.

Predictions count operations and bytes. They know nothing of kernels, of fixed costs of a call, or of how often a layer
is accepted: the last is asked for, and the benchmark prints measurements beside predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.rule.cost import (
    ModelShape,
    break_even_kept,
    expected_gain,
    gather_bytes,
    kv_bytes_per_layer,
    prefill_flops,
    scoring_bytes,
    scoring_flops,
    transfer_bytes,
)
from entroprefill_rag.rule.paging import pages_freed


@dataclass(frozen=True)
class Plan:
    """What pruning one prompt at one layer would save and cost.

    Attributes:
        tokens: length of the prompt [n].
        kept_tokens: those above the layer.
        layer: the accepted layer [l].
        full_flops: of a prefill without pruning.
        pruned_flops: of a pruned one, looking included.
        scoring_flops: of looking at all monitored layers.
        scoring_bytes: peak memory of the rows of one layer, in float32, unless read group by group.
        gather_bytes: read and written to gather the retained states.
        speedup: full over pruned, where time goes with operations.
        break_even_kept_share: largest share of the prompt's tokens that may be kept without a loss; None where no
            share pays.
        accept_rate: share of requests at which a layer is accepted, as given.
        expected_speedup: over all requests, those included that look and then prefill in full.
        break_even_accept_rate: below it, looking costs more than pruning saves; None where it never pays.
        kv_bytes_per_layer: of the cache per layer: a full one, and a pruned one above the layer.
        kv_bytes: of the whole cache, full and pruned.
        page: tokens in a page [B].
        pages: of the whole cache, in full.
        pages_freed_compacted: if the retained tokens are moved together.
        pages_freed_in_place: if they stay where they are.
        pages_freed_shared_table: if one block table addresses all layers.
        transfer_bytes: from a prefill to a decode machine, full and pruned.
        transfer_seconds: the same at the bandwidth given, or None.
        prefill_seconds: full and pruned at the speed given, or None.
    """

    tokens: int
    kept_tokens: int
    layer: int
    full_flops: int
    pruned_flops: int
    scoring_flops: int
    scoring_bytes: int
    gather_bytes: int
    speedup: float
    break_even_kept_share: float | None
    accept_rate: float
    expected_speedup: float
    break_even_accept_rate: float | None
    kv_bytes_per_layer: tuple[int, int]
    kv_bytes: tuple[int, int]
    page: int
    pages: int
    pages_freed_compacted: int
    pages_freed_in_place: int
    pages_freed_shared_table: int
    transfer_bytes: tuple[int, int]
    transfer_seconds: tuple[float, float] | None
    prefill_seconds: tuple[float, float] | None


def kept_positions(tokens: int, *, keep: float, chunks: int, other: int) -> NDArray[np.int64]:
    """Positions retained of a prompt of equal chunks, of which a share stays, spread evenly.

    Args:
        tokens: length of the prompt.
        keep: share of the chunks that stays, in [0, 1].
        chunks: how many.
        other: tokens that are no chunk's (instruction, query, template), half of them before the chunks.

    Raises:
        ValueError: a share outside [0, 1], or a prompt with less than one token a chunk.
    """
    if not 0.0 <= keep <= 1.0 or chunks < 1 or other < 0 or tokens - other < chunks:
        raise ValueError(
            f"need keep in [0, 1], chunks >= 1 and at least one token a chunk, got keep={keep}, chunks={chunks} and "
            f"{tokens} tokens of which {other} are no chunk's"
        )
    edges = other // 2 + (tokens - other) * np.arange(chunks + 1, dtype=np.int64) // chunks
    stay = round(chunks * keep)
    kept = np.ones(tokens, dtype=np.bool_)
    kept[edges[0] : edges[-1]] = False
    for i in (floor((part + 0.5) * chunks / stay) for part in range(stay)):
        kept[edges[i] : edges[i + 1]] = True
    return np.flatnonzero(kept)


def plan_prefill(
    shape: ModelShape,
    *,
    tokens: int,
    layer: int,
    kept: NDArray[np.int64],
    monitored: int = 8,
    rows: int = 16,
    page: int = 16,
    accept_rate: float = 1.0,
    bytes_per_second: float | None = None,
    flops_per_second: float | None = None,
) -> Plan:
    """Predict what pruning saves and costs (section 9, correction 11).

    Looking is counted at every monitored layer, whether one before the last is accepted or none.

    Args:
        shape: the model.
        tokens: length of the prompt [n].
        layer: the accepted layer [l].
        kept: ascending positions retained above it.
        monitored: layers looked at [J].
        rows: distinct rows read at each, proposal and audit together.
        page: tokens in a page of the KV cache [B].
        accept_rate: share of requests at which a layer is accepted.
        bytes_per_second: between a prefill and a decode machine.
        flops_per_second: of the machine.

    Raises:
        ValueError: a layer or positions that do not fit, a rate outside [0, 1], or a speed that is not positive.
    """
    speeds = [speed for speed in (bytes_per_second, flops_per_second) if speed is not None]
    if not 0.0 <= accept_rate <= 1.0 or any(speed <= 0 for speed in speeds) or not len(kept):
        raise ValueError(
            f"need accept_rate in [0, 1], speeds above 0 and a kept token, got {accept_rate}, {speeds} and {len(kept)}"
        )
    looking = scoring_flops(shape, monitored=monitored, rows=rows, tokens=tokens)
    full = prefill_flops(shape, tokens)
    saving = full - prefill_flops(shape, tokens, kept, layer)
    pruned = full - saving + looking
    gain = expected_gain(accept_rate, saving, looking)
    even = break_even_kept(shape, tokens=tokens, layer=layer, overhead=looking)
    above = shape.layers - 1 - layer
    moved = pages_freed(kept, tokens=tokens, page=page, layers_above=above)
    shared = pages_freed(kept, tokens=tokens, page=page, layers_above=above, block_tables="shared")
    cache = kv_bytes_per_layer(shape, tokens=tokens, kept=len(kept), layer=layer)
    everything = kv_bytes_per_layer(shape, tokens=tokens, kept=tokens, layer=layer)
    transfer = tuple(transfer_bytes(shape, tokens=tokens, kept=count, layer=layer) for count in (tokens, len(kept)))
    return Plan(
        tokens=tokens,
        kept_tokens=len(kept),
        layer=layer,
        full_flops=full,
        pruned_flops=pruned,
        scoring_flops=looking,
        scoring_bytes=scoring_bytes(shape, rows=rows, tokens=tokens),
        gather_bytes=gather_bytes(shape, len(kept)),
        speedup=full / pruned,
        break_even_kept_share=None if even is None else even / tokens,
        accept_rate=accept_rate,
        expected_speedup=full / (full - gain),
        break_even_accept_rate=looking / saving if 0 < looking <= saving else 0.0 if saving > 0 == looking else None,
        kv_bytes_per_layer=(everything[-1], cache[-1]),
        kv_bytes=(sum(everything), sum(cache)),
        page=page,
        pages=shape.layers * -(-tokens // page),
        pages_freed_compacted=moved.compacted,
        pages_freed_in_place=moved.in_place,
        pages_freed_shared_table=shared.compacted,
        transfer_bytes=(transfer[0], transfer[1]),
        transfer_seconds=None
        if bytes_per_second is None
        else (transfer[0] / bytes_per_second, transfer[1] / bytes_per_second),
        prefill_seconds=None if flops_per_second is None else (full / flops_per_second, pruned / flops_per_second),
    )
