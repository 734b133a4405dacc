"""The sources of an answer, in prompt order: what became of each chunk. Numbers and ids only, no layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from entroprefill_rag.record import AuditRecord
from entroprefill_rag.report.why import held_back
from entroprefill_rag.request import Chunk

Status = Literal["kept", "dropped", "protected", "not admitted"]


@dataclass(frozen=True)
class Source:
    """One chunk of the request.

    Attributes:
        number: its place in the prompt, from 1; None where it was not admitted.
        id: its id.
        title: its title, as far as known.
        path: the document it is from, as far as known.
        status: what became of it.
        reason: why it is protected, or what held it though it ranked among those to go.
        tokens: its length in the prompt.
        score: similarity to the question when it was retrieved.
        mass_share: its share of the pooled attention on chunks, at the accepted layer, else the last one tried.
        evidence: what the question looks at in it beyond the words before it, in the profile's heads, which ranked the
            chunks; None where the layer's own heads did.
    """

    number: int | None
    id: str
    title: str
    path: str | None
    status: Status
    reason: str | None = None
    tokens: int | None = None
    score: float | None = None
    mass_share: float | None = None
    evidence: float | None = None


def sources_of(record: AuditRecord, chunks: Sequence[Chunk] = ()) -> list[Source]:
    """The sources of a record.

    Args:
        record: holds ids, positions and masses.
        chunks: the request's chunks, for titles, paths and scores; a record alone knows them only where it was made
            with ``include_text``.
    """
    known = {chunk.id: chunk for chunk in chunks}
    masses = record.trial.pooled_mass if record.trial is not None else ()
    evidence = record.trial.evidence if record.trial is not None else ()
    total, held = sum(masses), held_back(record)
    found = []
    for position, info in enumerate(record.prompt.chunks):
        chunk = known.get(info.id)
        share = masses[position] / total if position < len(masses) and total > 0 else None
        found.append(
            Source(
                number=position + 1,
                id=info.id,
                title=info.title or (chunk.title if chunk else ""),
                path=_path(chunk),
                status="dropped" if not info.kept else "protected" if info.protected else "kept",
                reason=info.protected or held.get(position),
                tokens=info.end - info.start,
                score=_score(chunk),
                mass_share=share,
                evidence=evidence[position] if position < len(evidence) else None,
            )
        )
    for name in record.prompt.not_admitted:
        chunk = known.get(name)
        title = chunk.title if chunk else ""
        found.append(Source(None, name, title, _path(chunk), "not admitted", score=_score(chunk)))
    return found


def _path(chunk: Chunk | None) -> str | None:
    path = chunk.metadata.get("path") if chunk else None
    return path if isinstance(path, str) else None


def _score(chunk: Chunk | None) -> float | None:
    score = chunk.metadata.get("score") if chunk else None
    return float(score) if isinstance(score, (int, float)) and not isinstance(score, bool) else None
