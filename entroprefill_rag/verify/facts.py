"""The numbers that every check starts from: the configuration as parsed, lengths, caps and goals."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.record import AuditRecord
from entroprefill_rag.rule.proposal import proposal_rows
from entroprefill_rag.rule.removal import row_caps


@dataclass(frozen=True)
class Facts:
    """A record, and what its configuration and prompt alone imply.

    Attributes:
        record: the record.
        config: its configuration.
        plugged_in: head weights came from a callable, which a record cannot hold.
        tokens: ``[k]`` chunk lengths.
        removable: ``[k]``.
        rows: positions of the proposal rows ``[W_p]``.
        caps: ``[W_p]`` their caps, before a relative one.
        least: tokens that must be saved.
        most: tokens that may be saved.
        target: tokens at which removal stops.
    """

    record: AuditRecord
    config: PruningConfig
    plugged_in: bool
    tokens: NDArray[np.int64]
    removable: NDArray[np.bool_]
    rows: tuple[int, ...]
    caps: NDArray[np.float64]
    least: int
    most: int
    target: int

    @property
    def total(self) -> int:
        """Chunk tokens in all."""
        return int(self.tokens.sum())

    @property
    def k_max(self) -> int:
        """``K``: the most chunks that may go."""
        return max(0, min(int(self.removable.sum()), len(self.tokens) - self.config.m0))

    @property
    def document_block(self) -> tuple[int, int]:
        """From the first chunk's start to the last chunk's end."""
        chunks = self.record.prompt.chunks
        return chunks[0].start, chunks[-1].end

    @property
    def one_cap(self) -> float | None:
        """The cap of every head and row; None where they differ."""
        return self.config.eps_row if isinstance(self.config.eps_row, float) and self.config.rho is None else None

    def layout(self) -> PromptLayout:
        """The prompt's layout, its token ids unknown."""
        prompt = self.record.prompt
        return PromptLayout(
            input_ids=(0,) * prompt.tokens,
            chunk_ids=tuple(chunk.id for chunk in prompt.chunks),
            chunk_spans=tuple((chunk.start, chunk.end) for chunk in prompt.chunks),
            protected=(),
            protected_reasons=tuple(chunk.protected for chunk in prompt.chunks),
            sink_tokens=prompt.sink_tokens,
            suffix_span=prompt.suffix,
            query_span=prompt.query_span,
            rendered="",
        )


def config_of(record: AuditRecord) -> tuple[PruningConfig, bool]:
    """The configuration of a record, and whether its head weights came from a callable (then read as 'renyi').

    Raises:
        pydantic.ValidationError: it is no configuration.
    """
    data = dict(record.config)
    plugged_in = str(data.get("head_weights", "")).startswith("callable:")
    if plugged_in:
        data["head_weights"] = "renyi"
    return PruningConfig.model_validate(data), plugged_in


def facts_of(record: AuditRecord, config: PruningConfig, plugged_in: bool) -> Facts:
    """What the record's prompt and configuration imply (section 5; proposal rows: section 6)."""
    tokens = np.array([chunk.end - chunk.start for chunk in record.prompt.chunks], dtype=np.int64)
    total = int(tokens.sum())
    rows = tuple(proposal_rows(record.prompt.suffix, config.proposal_rows).tolist())
    # As the proposal does it: 1e-9 takes back what a product of floats adds.
    most = floor(config.max_saving * total + 1e-9)
    return Facts(
        record=record,
        config=config,
        plugged_in=plugged_in,
        tokens=tokens,
        removable=np.array([chunk.protected is None for chunk in record.prompt.chunks], dtype=np.bool_),
        rows=rows,
        caps=row_caps(config.eps_row, len(rows)),
        least=ceil(config.min_saving * total - 1e-9),
        most=most,
        target=min(ceil(config.target_saving * total - 1e-9), most),
    )
