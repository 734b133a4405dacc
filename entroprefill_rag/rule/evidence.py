"""Evidence pooled over layers: which heads, of this and earlier layers, rank the chunks (issue 5, correction 6).

Where a question is answered shows in a few heads, and not all of them are in one layer. A profile names them for every
monitored layer. Only the order in which chunks are tried comes from here: caps, envelope and audit are taken from the
monitored layer's own rows and its own floored weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.config import HeadProfile

Floats = NDArray[np.float64]


class Evidence:
    """What the picked heads of one request have shown so far.

    Args:
        profile: names the heads; None, or one that names none, leaves every layer to its own weights.
        mu_min: least mass on the chunks of a head that counts.
    """

    def __init__(self, profile: HeadProfile | None, mu_min: float) -> None:
        self._profile, self._mu_min = profile, mu_min
        self._wanted = {head[:2] for _, heads in (profile.pooled if profile else ()) for head in heads}
        self._seen: dict[tuple[int, int], Floats] = {}

    def layers(self, monitored: Iterable[int]) -> tuple[int, ...]:
        """Layers whose rows are wanted at one of these, ascending."""
        if self._profile is None:
            return ()
        return tuple(sorted({head[0] for layer in monitored for head in self._profile.heads_at(layer)}))

    def note(self, layer: int, mean_rows: Floats) -> None:
        """Keep the picked heads of a layer.

        A head's attention is divided by its mass on the chunks, so that heads of different layers, which look at the
        documents more or less, have the same say. One below ``mu_min``, or with values that are no numbers, has none.

        Args:
            layer: its index.
            mean_rows: ``[H_Q, T]`` mean attention of the proposal rows on the chunk tokens outside the sinks.
        """
        for head in range(len(mean_rows)):
            if (layer, head) in self._wanted:
                mass = float(mean_rows[head].sum())
                if np.isfinite(mass) and mass >= self._mu_min:
                    self._seen[layer, head] = mean_rows[head] / mass

    def at(self, layer: int) -> Floats | None:
        """``[T]`` share of the picked heads' attention on every chunk token, summing to 1; None where none counts."""
        heads = self._profile.heads_at(layer) if self._profile else ()
        found = [(share, self._seen[at, head]) for at, head, share in heads if (at, head) in self._seen]
        if not found:
            return None
        total = sum(share for share, _ in found)
        return np.asarray(sum(share / total * one for share, one in found))
