"""Evidence: which chunks the question's rows look at more than the rows before it do (issue 5, correction 6).

Where a question is answered shows in a few heads, and not all of them are in one layer: a profile names them for every
monitored layer. And it shows in the rows of the question's own words. The words before it ("Question:") see the same
chunks and know nothing of the question: what they attend to is position, length and habit, and it is taken off (the
idea of calibration by a content-free query, Chen et al. 2024, arXiv 2410.02642, at no further forward).

Only the order in which chunks are tried comes from here: caps, envelope and audit are taken from the monitored layer's
own rows and its own floored weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entroprefill_rag.config import HeadProfile
from entroprefill_rag.prompt import PromptLayout

Floats = NDArray[np.float64]

QUESTION_ROWS = 64
"""Most rows of the question that are read: the last ones."""
ROWS_BEFORE = 16
"""Most rows between the documents and the question that are read: the last ones."""
_NO_ATTENTION = 1e-9


@dataclass(frozen=True)
class EvidenceRows:
    """Which rows say what the question looks at.

    Attributes:
        rows: LongTensor ``[R]``, their positions: the question's own first, then those before it.
        own: how many of them are the question's.
    """

    rows: Tensor
    own: int

    @classmethod
    def of(cls, layout: PromptLayout, instead: Tensor) -> EvidenceRows:
        """Those of a prompt.

        Args:
            layout: the prompt.
            instead: rows that stand for the question's where it is not known which these are.
        """
        if layout.query_span is None:
            return cls(instead, len(instead))
        start, end = layout.query_span
        own = torch.arange(max(start, end - QUESTION_ROWS), end, device="cpu")
        before = torch.arange(max(layout.suffix_span[0], start - ROWS_BEFORE), start, device="cpu")
        return cls(torch.cat([own, before]), len(own))

    def means(self, masses: Floats) -> tuple[Floats, Floats]:
        """``[H_Q, k]`` mean masses of the question's rows and of those before it (zeros where there are none).

        Args:
            masses: ``[H_Q, R, k]`` of all of them.
        """
        before = masses[:, self.own :]
        return masses[:, : self.own].mean(axis=1), before.mean(axis=1) if before.size else np.zeros(masses.shape[::2])


def excess(question: Floats, before: Floats) -> tuple[Floats, Floats]:
    """What a head's question rows place on every chunk beyond the rows before it, as a share of what they place on all.

    Args:
        question: ``[..., k]`` mean masses of the question's rows.
        before: ``[..., k]`` of the rows before it; zeros where there are none.

    Returns:
        ``[..., k]`` shares, which sum to at most 1 and may be negative; and ``[...]`` the mass of the question's rows
        on all chunks. A head that has none, or not a number, has shares of 0.
    """
    mass = question.sum(axis=-1)
    able = np.isfinite(mass) & np.isfinite(before).all(axis=-1) & (mass > _NO_ATTENTION)
    shares = np.zeros_like(question)
    np.divide(question - before, mass[..., None], out=shares, where=able[..., None])
    return shares, np.where(able, mass, 0.0)


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

    def note(self, layer: int, question: Floats, before: Floats) -> None:
        """Keep the picked heads of a layer.

        A head's excess is a share of its own mass on the chunks, so that heads of different layers, which look at the
        documents more or less, have the same say. One below ``mu_min``, or with values that are no numbers, has none.

        Args:
            layer: its index.
            question: ``[H_Q, k]`` mean masses of the question's rows on the chunks outside the sinks.
            before: ``[H_Q, k]`` of the rows before it; zeros where there are none.
        """
        shares, mass = excess(question, before)
        for head in range(len(question)):
            if (layer, head) in self._wanted and mass[head] >= self._mu_min:
                self._seen[layer, head] = shares[head]

    def at(self, layer: int) -> Floats | None:
        """``[k]`` mean excess of the picked heads on every chunk; None where none of them counts."""
        heads = self._profile.heads_at(layer) if self._profile else ()
        found = [(share, self._seen[at, head]) for at, head, share in heads if (at, head) in self._seen]
        if not found:
            return None
        total = sum(share for share, _ in found)
        return np.asarray(sum(share / total * one for share, one in found))
