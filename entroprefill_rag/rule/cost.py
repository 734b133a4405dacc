"""Does it pay: what pruning saves, what looking costs, and the memory it frees (section 9, correction 11).

Floating-point operations are counted as two per multiply-add. Only sizes go in: a model's configuration, a prompt's
length, the tokens kept. Nothing here promises a speed-up; the benchmark prints prediction beside measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that decide its cost.

    Attributes:
        layers: decoder layers [L].
        hidden: width of a state.
        intermediate: width of the MLP; of a mixture of experts, summed over the experts that run for a token.
        query_heads: [H_Q].
        kv_heads: [G].
        head_dim: width of a head.
        vocab: entries of the unembedding.
        bytes_per_value: of a stored key, value or state; 2 for bfloat16.
        gated_mlp: three matrices (gate, up, down) rather than two.
        windows: per layer, how many keys back a row sees; None for all. Empty: every layer sees all.
    """

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    bytes_per_value: int = 2
    gated_mlp: bool = True
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        """Refuse sizes that are no model.

        Raises:
            ValueError: a size below one, or windows that do not match the layers.
        """
        sizes = (self.layers, self.hidden, self.intermediate, self.query_heads, self.kv_heads, self.head_dim)
        if min(*sizes, self.vocab, self.bytes_per_value) < 1:
            raise ValueError(f"every size of a model must be at least 1, got {self}")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows must name all {self.layers} layers or none, got {len(self.windows)}")

    @property
    def linear_flops(self) -> int:
        """Of the projections and the MLP of one layer, per token."""
        attention = self.hidden * self.head_dim * 2 * (self.query_heads + self.kv_heads)
        mlp = (3 if self.gated_mlp else 2) * self.hidden * self.intermediate
        return 2 * (attention + mlp)

    @property
    def pair_flops(self) -> int:
        """Of one layer's attention, per row and key that it sees: score and weighted value, over all query heads."""
        return 4 * self.query_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Of one layer's cache, per token."""
        return 2 * self.kv_heads * self.head_dim * self.bytes_per_value

    def window(self, layer: int) -> int | None:
        """How many keys back a row of the layer sees, itself included; None for all."""
        return self.windows[layer] if self.windows else None


def attention_pairs(positions: ArrayLike, window: int | None = None) -> int:
    """Row-key pairs of causal attention among tokens at these positions.

    Args:
        positions: ascending original positions of the tokens present, ``[tokens]``.
        window: keys back that a row sees, itself included, by original position; None for all.
    """
    places = np.asarray(positions, dtype=np.int64)
    count = len(places)
    if window is None:
        return count * (count + 1) // 2
    first = np.searchsorted(places, places - window + 1)
    return int((np.arange(1, count + 1) - first).sum())


def spread_evenly(tokens: int, kept: int) -> NDArray[np.int64]:
    """Positions of ``kept`` out of ``tokens`` tokens, spread evenly: for a plan, before any are known."""
    if not 1 <= kept <= tokens:
        raise ValueError(f"between 1 and all {tokens} tokens may be kept, got {kept}")
    return np.arange(kept, dtype=np.int64) * tokens // kept


def layer_flops(shape: ModelShape, layer: int, positions: ArrayLike) -> int:
    """Operations of one layer on the tokens at these positions."""
    places = np.asarray(positions, dtype=np.int64)
    return shape.linear_flops * len(places) + shape.pair_flops * attention_pairs(places, shape.window(layer))


def prefill_flops(shape: ModelShape, tokens: int, kept: ArrayLike | None = None, layer: int | None = None) -> int:
    """Operations of a prefill, with the unembedding of its last token.

    Args:
        shape: the model.
        tokens: length of the prompt [n].
        kept: ascending positions retained above ``layer``; None for a full prefill.
        layer: the accepted layer [l]; layers up to it run on every token.

    Raises:
        ValueError: only one of ``kept`` and ``layer`` given, or a layer that the model has not.
    """
    if (kept is None) != (layer is None):
        raise ValueError("a pruned prefill needs both the kept positions and the layer; a full one neither")
    everything = np.arange(tokens, dtype=np.int64)
    split = shape.layers - 1 if layer is None else layer
    if not 0 <= split < shape.layers:
        raise ValueError(f"layer {layer} is not one of the model's {shape.layers}")
    below = sum(layer_flops(shape, index, everything) for index in range(split + 1))
    above = 0 if kept is None else sum(layer_flops(shape, index, kept) for index in range(split + 1, shape.layers))
    return below + above + 2 * shape.hidden * shape.vocab


def scoring_flops(shape: ModelShape, *, monitored: int, rows: int, tokens: int) -> int:
    """Operations of reading rows: ``J * H_Q * rows * n`` scores of ``d_head`` multiply-adds (section 2).

    Args:
        shape: the model.
        monitored: layers looked at [J].
        rows: distinct rows read at each, proposal and audit together.
        tokens: length of the prompt [n].
    """
    return 2 * monitored * shape.query_heads * rows * tokens * shape.head_dim


def scoring_bytes(shape: ModelShape, *, rows: int, tokens: int) -> int:
    """Peak memory of the rows of one layer in float32, unless they are read group by group (correction 11)."""
    return 4 * shape.query_heads * rows * tokens


def gather_bytes(shape: ModelShape, kept: int) -> int:
    """Bytes read and written to gather the retained states once."""
    return 2 * kept * shape.hidden * shape.bytes_per_value


def expected_gain(accept: float, saving: float, overhead: float, overhead_on_bypass: float | None = None) -> float:
    """Expected gain per request, in the unit given: ``P(accept) * saving - overhead`` (correction 11).

    Args:
        accept: share of requests accepted.
        saving: saved on acceptance, before overhead.
        overhead: cost of looking where a layer is accepted.
        overhead_on_bypass: cost of looking where none is (all monitored layers are read); None: the same.
    """
    bypass = overhead if overhead_on_bypass is None else overhead_on_bypass
    return accept * (saving - overhead) - (1.0 - accept) * bypass


def break_even_kept(shape: ModelShape, *, tokens: int, layer: int, overhead: int) -> int | None:
    """Most tokens that may be kept so that pruning costs no more operations than a full prefill.

    Args:
        shape: the model.
        tokens: length of the prompt [n].
        layer: the accepted layer [l].
        overhead: operations of looking (:func:`scoring_flops`).

    Returns:
        The count, tokens spread evenly; None where even one kept token does not pay.
    """
    budget = prefill_flops(shape, tokens) - overhead

    def pays(kept: int) -> bool:
        return prefill_flops(shape, tokens, spread_evenly(tokens, kept), layer) <= budget

    if not pays(1):
        return None
    low, high = 1, tokens + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def predicted_speedup(
    shape: ModelShape,
    *,
    tokens: int,
    kept: ArrayLike,
    layer: int,
    overhead: int,
    flops_per_second: float | None = None,
    fixed_seconds: float = 0.0,
) -> float:
    """Full prefill over pruned prefill, where time goes with operations.

    Args:
        shape: the model.
        tokens: length of the prompt [n].
        kept: ascending positions retained above ``layer``.
        layer: the accepted layer [l].
        overhead: operations of looking.
        flops_per_second: of this machine; needed only with ``fixed_seconds``.
        fixed_seconds: what does not go with operations: a synchronisation per monitored layer, gathers, the rule.

    Raises:
        ValueError: ``fixed_seconds`` without a positive ``flops_per_second``.
    """
    if fixed_seconds and not (flops_per_second and flops_per_second > 0):
        raise ValueError("seconds can only be compared with operations through flops_per_second > 0")
    fixed = fixed_seconds * flops_per_second if flops_per_second else 0.0
    return prefill_flops(shape, tokens) / (prefill_flops(shape, tokens, kept, layer) + overhead + fixed)


def kv_bytes_per_layer(shape: ModelShape, *, tokens: int, kept: int, layer: int) -> tuple[int, ...]:
    """Bytes of the cache after the prefill, per layer: all tokens up to ``layer``, the retained above."""
    return tuple(shape.kv_bytes * (tokens if index <= layer else kept) for index in range(shape.layers))


def transfer_bytes(shape: ModelShape, *, tokens: int, kept: int, layer: int) -> int:
    """Bytes that a transfer from a prefill to a decode machine must move."""
    return sum(kv_bytes_per_layer(shape, tokens=tokens, kept=kept, layer=layer))
