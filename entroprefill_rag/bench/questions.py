"""Labelled questions from JSON lines, and taking them from their sets in turn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from entroprefill_rag.errors import RequestError
from entroprefill_rag.request import Chunk, RagRequest

Need = Literal["all", "any", "part", "none"]
NEEDS: tuple[Need, ...] = ("all", "any", "part", "none")


@dataclass(frozen=True)
class Question:
    """A question over labelled chunks.

    Attributes:
        id: unique within its set.
        set: the data set it belongs to.
        text: the question.
        answers: accepted strings; none where the chunks hold no answer.
        chunks: in the order of retrieval.
        gold: ids of the chunks that hold the answer, or a part of it.
        need: which of them are needed: all, any one (also 'part': several answers, one is enough), or none.
    """

    id: str
    set: str
    text: str
    answers: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    gold: frozenset[str]
    need: Need

    def request(self, keep: Iterable[str] | None = None) -> RagRequest:
        """The question over its chunks, or over those of these ids, in their own order."""
        wanted = None if keep is None else set(keep)
        return RagRequest(query=self.text, chunks=tuple(c for c in self.chunks if wanted is None or c.id in wanted))


def load(files: Sequence[Path]) -> list[Question]:
    """All questions of all files that have chunks.

    Raises:
        RequestError: a line that is no question, two questions of a set with one id, or no question at all.
    """
    found: dict[tuple[str, str], Question] = {}
    for file in files:
        # Not splitlines: JSON may hold U+2028 and the like as they are.
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                one = _question(json.loads(line), file.stem)
            except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
                raise RequestError(
                    f"line {number} of {str(file)!r} is no labelled question ({type(error).__name__}); it needs id, "
                    "question, answers, chunks [{id, title, text}], gold_chunk_ids, as benchmarks/data/README.md says"
                ) from error
            if (one.set, one.id) in found:
                raise RequestError(f"line {number} of {str(file)!r} repeats the id {one.id!r} of the set {one.set!r}")
            if one.chunks:
                found[one.set, one.id] = one
    if not found:
        raise RequestError(f"no question with chunks in {', '.join(map(repr, map(str, files)))}")
    return list(found.values())


def _question(told: dict[str, Any], stem: str) -> Question:
    chunks = tuple(Chunk(id=part["id"], text=part["text"], title=part.get("title") or "") for part in told["chunks"])
    gold = frozenset(map(str, told["gold_chunk_ids"]))
    if isinstance(told["answers"], str) or isinstance(told["gold_chunk_ids"], str):
        raise TypeError("a list is expected")
    need = (told.get("meta") or {}).get("gold_need") or ("all" if gold else "none")
    if need not in NEEDS or not gold <= {chunk.id for chunk in chunks}:
        raise ValueError("gold_need is unknown, or gold is not among the chunks")
    RagRequest(query=told["question"], chunks=chunks)
    return Question(
        id=str(told["id"]),
        set=str(told.get("set") or stem),
        text=told["question"],
        answers=tuple(map(str, told["answers"])),
        chunks=chunks,
        gold=gold,
        need=need,
    )


def in_turn(questions: Sequence[Question], most: int | None = None) -> list[Question]:
    """At most ``most`` questions: the first of every set, then the second of every set, and so on."""
    piles: dict[str, list[Question]] = {}
    for question in questions:
        piles.setdefault(question.set, []).append(question)
    longest = max(map(len, piles.values()), default=0)
    order = [pile[i] for i in range(longest) for pile in piles.values() if i < len(pile)]
    return order if most is None else order[:most]
