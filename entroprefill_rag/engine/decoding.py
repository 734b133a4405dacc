"""While decoding: what generated tokens' rows place on the removed chunks, at the accepted layer (section 10).

That layer still holds every key of the prompt, so a generated token's row is the one that an unpruned run over the same
tokens would have there: up to this layer both compute the same. A measurement, not a guarantee: it says nothing of the
layers above, and it is known only once the next token has been chosen.

**Cost.** One row per generated token at one layer: with ``S`` keys of size ``d`` in ``G`` groups, ``2 H_Q S d``
operations and ``4 G S d`` bytes for the keys in float32 where they are not (at most ``4 * BLOCK_ELEMENTS``, or one
group's). Nothing grows with ``S * S``, and nothing waits for the device before the answer's end: to stop at a drift,
``generate`` is handed the comparison as a tensor, in the one look that it takes per token anyway.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.engine.tap import hidden_keys, softmax_rows
from entroprefill_rag.record import DecodeMonitor
from entroprefill_rag.rule.removal import row_caps

OnDrift = Literal["record", "stop", "restart_full"]

# Elements of one float32 block of keys.
BLOCK_ELEMENTS = 1 << 24


def removed_masses(
    query: Tensor,
    key: Tensor,
    removed: Tensor,
    *,
    scaling: float,
    attention_mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Mass that appended rows place on removed keys, per head; nothing leaves the device.

    The softmax runs in float32 over the keys that the layer's own mask allows, any sink logit in its denominator.

    Args:
        query: ``[1, H_Q, t, d]``, the rows of the ``t`` newest tokens, as the kernel gets them.
        key: ``[1, G, S, d]``, likewise: the last ``S`` positions so far, the ``t`` newest at their end.
        removed: 0/1 float32 ``[r]``, ``r <= S``, for the first ``r`` of these keys; all later ones are retained.
        scaling: the layer's own factor on the logits.
        attention_mask: None, ``[1, 1 or H_Q, t, S]`` boolean or additive, or a padding mask ``[1, at least S]``.
        window: sliding window in tokens.
        softcap: the layer's soft-cap on logits.
        sink_logits: learned sink logit per head, ``[H_Q]``.

    Returns:
        ``[t, H_Q]`` float32 in [0, 1]. A mass that is no number counts as 1.
    """
    heads, t, size = query.shape[1:]
    groups, stored = key.shape[1:3]
    per_group = heads // groups
    hidden = None
    if t > 1 or attention_mask is not None or (window is not None and stored > window):
        places = torch.arange(stored - t, stored, device=query.device)
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, -stored:]
        hidden = hidden_keys(places, stored, attention_mask, window, stored - t)
    at_once = max(1, BLOCK_ELEMENTS // (stored * size))
    parts = []
    for first in range(0, groups, at_once):
        keys = key[0, first : first + at_once].float()
        span = slice(first * per_group, (first + keys.shape[0]) * per_group)
        rows = query[0, span].float().reshape(keys.shape[0], per_group * t, size)
        logits = torch.matmul(rows, keys.transpose(1, 2)).mul_(scaling).reshape(-1, t, stored)
        weights = softmax_rows(
            logits,
            hidden if hidden is None or hidden.shape[0] == 1 else hidden[span],
            softcap=softcap,
            sink_logits=None if sink_logits is None else sink_logits[span],
        )
        parts.append((weights[..., : removed.numel()] * removed).sum(dim=-1))
    return torch.cat(parts).transpose(0, 1).clamp(0.0, 1.0).nan_to_num_(nan=1.0)


class DecodeWatch:
    """The rows of one answer. Idle until a layer has been accepted.

    Args:
        threshold: discarded mass, in any head, above which a token counts as drifted.
        on_drift: what is done then; this class only says what will have been done.
    """

    def __init__(self, threshold: float, on_drift: OnDrift = "record") -> None:
        self.threshold = threshold
        self.on_drift: OnDrift = on_drift
        self.layer: int | None = None
        self._limit = _float32_below(threshold)
        self._removed = torch.empty(0)
        self._on_device: dict[torch.device, Tensor] = {}
        self._rows: list[Tensor] = []

    @classmethod
    def of(cls, config: PruningConfig, rows: int) -> Self | None:
        """What ``config`` asks for, with ``rows`` proposal rows; None where nothing is to be watched.

        Without proposal rows no layer is ever accepted.
        """
        if not config.decode_monitor or rows == 0:
            return None
        threshold = config.drift_threshold
        if threshold is None:
            threshold = float(row_caps(config.eps_row, rows).max())
        return cls(threshold, config.on_drift)

    def begin(self, layer: int, kept: Tensor, n_tokens: int) -> None:
        """A layer was accepted.

        Args:
            layer: which one.
            kept: positions of the retained tokens, int64, on the CPU.
            n_tokens: length of the prompt.
        """
        self.layer = layer
        self._removed = torch.ones(n_tokens, dtype=torch.float32, device="cpu")
        self._removed[kept] = 0.0

    def read(self, query: Tensor, key: Tensor, attention_mask: Tensor | None, total: int, **options: Any) -> None:
        """Note the rows of tokens that are appended now.

        Args:
            query: ``[1, H_Q, t, d]``.
            key: ``[1, G, S, d]``; the last ``S`` of ``total`` positions.
            attention_mask: as the kernel gets it.
            total: tokens so far, these included.
            **options: as of :func:`removed_masses`.
        """
        device = query.device
        if device not in self._on_device:
            self._on_device[device] = self._removed.to(device)
        gone = self._on_device[device][total - key.shape[2] :]
        with torch.no_grad():
            self._rows.append(removed_masses(query, key, gone, attention_mask=attention_mask, **options))

    def above(self, device: torch.device) -> Tensor:
        """Whether a row of the last forward passed the threshold: boolean, without axes, on ``device``."""
        if not self._rows:
            return torch.zeros((), dtype=torch.bool, device=device)
        return (self._rows[-1].amax() > self._limit).to(device)

    def rows(self) -> Tensor:
        """All masses read so far, ``[tokens, H_Q]`` float32 on the CPU, brought there in one go."""
        return torch.cat(self._rows).cpu() if self._rows else torch.empty(0, 1, device="cpu")

    def result(self, tokens: int | None = None) -> DecodeMonitor | None:
        """What was seen; None where no layer was accepted.

        Args:
            tokens: generated tokens that were fed back. Where the loop reads ahead there may be rows of later ones,
                which do not count. None takes all rows.
        """
        if self.layer is None:
            return None
        rows = self.rows()[:tokens].double()
        largest = tuple(_told(float(value), self.threshold) for value in rows.amax(dim=1)) if len(rows) else ()
        above = next((index for index, value in enumerate(largest) if value > self.threshold), None)
        done: dict[OnDrift, Literal["none", "stopped", "restarted_full"]]
        done = {"record": "none", "stop": "stopped", "restart_full": "restarted_full"}
        return DecodeMonitor(
            layer=self.layer,
            threshold=self.threshold,
            on_drift=self.on_drift,
            tokens=len(largest),
            max_per_token=largest,
            mean=_mean(rows, largest),
            first_above=above,
            action=done[self.on_drift] if above is not None else "none",
        )


class StopOnDrift(StoppingCriteria):
    """Ends a generation once a row has passed the threshold; the token chosen from that row is the last."""

    def __init__(self, watch: DecodeWatch) -> None:
        self._watch = watch

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """One boolean for every sequence of the batch, still on the device."""
        return self._watch.above(input_ids.device).expand(input_ids.shape[0])


def _float32_below(threshold: float) -> float:
    """The largest float32 that is not above ``threshold``: float32 masses pass both or neither."""
    nearest = np.float32(threshold)
    return float(nearest if float(nearest) <= threshold else np.nextafter(nearest, np.float32(-math.inf)))


def _told(mass: float, threshold: float) -> float:
    """Four significant digits; all of them where rounding would carry it over the threshold."""
    rounded = float(f"{mass:.4g}")
    return rounded if (rounded > threshold) == (mass > threshold) else mass


def _mean(rows: Tensor, largest: tuple[float, ...]) -> float:
    """Over tokens and heads; within what the recorded maxima allow, which rounding may have moved."""
    if not largest:
        return 0.0
    most = sum(largest) / len(largest)
    return min(max(float(f"{float(rows.mean()):.9g}"), most / rows.shape[1]), most)
