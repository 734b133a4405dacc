"""What the rows of one prompt's question see at every layer and head: the numbers that a profile is fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.engine import families
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.request import RagRequest
from entroprefill_rag.rule.evidence import EvidenceRows, excess
from entroprefill_rag.rule.masses import RowMasses
from entroprefill_rag.rule.pooling import renyi_entropy
from entroprefill_rag.rule.proposal import Proposer

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """One prompt, as every layer that may be monitored saw it.

    Attributes:
        layers: the layers, ascending, ``[L]`` of them.
        masses: per layer ``[H_Q, W_p, k]``, mass of every proposal row on every chunk, outside the sinks.
        question: per layer ``[H_Q, k]``, mean masses of the question's own rows.
        before: per layer ``[H_Q, k]``, of the rows between the documents and the question; zeros where there are none.
        entropy: ``[L, H_Q]`` Renyi entropy of the mean row over the chunk tokens.
        tokens: ``[k]`` chunk lengths.
        removable: ``[k]``.
        gold: positions of the gold chunks.
        n_tokens: prompt length.
    """

    layers: tuple[int, ...]
    masses: tuple[Floats, ...]
    question: tuple[Floats, ...]
    before: tuple[Floats, ...]
    entropy: Floats
    tokens: NDArray[np.int64]
    removable: NDArray[np.bool_]
    gold: tuple[int, ...]
    n_tokens: int

    def excess(self) -> tuple[Floats, Floats]:
        """``[L, H_Q, k]`` evidence of every head by itself; ``[L, H_Q]`` mass of the question's rows on all chunks."""
        return excess(np.stack(self.question), np.stack(self.before))

    def mean(self) -> Floats:
        """``[L, H_Q, k]`` chunk masses, mean over the proposal rows."""
        return np.stack([masses.mean(axis=1) for masses in self.masses])

    def last(self) -> Floats:
        """``[L, H_Q, k]`` chunk masses of the prompt's last row alone."""
        return np.stack([masses[:, -1] for masses in self.masses])


class _Watcher:
    """Reads the proposal rows and those of the question at every layer, and accepts nothing."""

    def __init__(self, config: PruningConfig, layout: PromptLayout, layers: tuple[int, ...], groups: int) -> None:
        self.layers = layers
        self._proposer = Proposer(config, layout, groups)
        self._documents = np.concatenate(
            [
                np.arange(max(start, layout.sink_tokens), max(end, layout.sink_tokens))
                for start, end in layout.chunk_spans
            ]
        )
        self._evidence_rows = EvidenceRows.of(layout, self._proposer.rows)
        self.masses: list[Floats] = []
        self.question: list[Floats] = []
        self.before: list[Floats] = []
        self.entropy: list[Floats] = []

    def observe(self, layer: int, read: Any) -> Any:
        """Keep what this layer shows."""
        rows: RowMasses = read(self._proposer.rows, True)
        if rows.tokens is None:
            raise ValueError("the mean row per token was asked for and not read")
        self.masses.append(rows.chunks.double().numpy())
        evidence = read(self._evidence_rows.rows, False).chunks.double().numpy()
        question, before = self._evidence_rows.means(evidence)
        self.question.append(question)
        self.before.append(before)
        self.entropy.append(renyi_entropy(rows.tokens.double().numpy()[:, self._documents])[1])
        return _TurnedDown()


class _TurnedDown:
    accepted = False


def measure(
    backend: LocalBackend, request: RagRequest, gold: Sequence[int], config: PruningConfig | None = None
) -> Measured:
    """Run one prompt up to the last layer that may be monitored and keep what its rows see.

    Args:
        backend: the model.
        request: the prompt.
        gold: positions of its gold chunks.
        config: for the number of sinks and of proposal rows.

    Raises:
        ConfigError: the model's attention cannot be read.
        RequestError: the request cannot be laid out.
    """
    config = config or PruningConfig()
    layout = backend.layout(request, config)
    block = (layout.chunk_spans[0][0], layout.chunk_spans[-1][1])
    layers = families.monitorable(backend.anatomy, block, layout.n_tokens)
    watcher = _Watcher(config, layout, layers, backend.anatomy.kv_heads)
    backend.watch(layout, watcher)
    return Measured(
        layers=layers,
        masses=tuple(watcher.masses),
        question=tuple(watcher.question),
        before=tuple(watcher.before),
        entropy=np.stack(watcher.entropy),
        tokens=np.array(layout.chunk_tokens, dtype=np.int64),
        removable=np.array(layout.removable, dtype=np.bool_),
        gold=tuple(gold),
        n_tokens=layout.n_tokens,
    )
