"""A prompt as token ids, with every chunk's span and what is protected in it, and why."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PromptLayout:
    """Token ids of one prompt and the place of every chunk in it (algorithm, section 1).

    Attributes:
        input_ids: token ids, length ``n``.
        chunk_ids: ids of the admitted chunks, in prompt order, length ``k``.
        chunk_spans: half-open token ranges ``(start, end)`` of the chunks, ascending, disjoint.
        protected: per token, length ``n``: True where the token may never be removed.
        protected_reasons: per chunk, ``None`` for a removable one, else why it is protected.
        sink_tokens: number of first tokens counted as attention sinks.
        suffix_span: half-open range of the query and the template's tail; ends at ``n``.
        query_span: half-open range of the query's own tokens in the suffix; None where it is not known.
        rendered: the prompt as text, what ``input_ids`` decode to (up to the tokenizer's own normaliser).
        not_admitted: ids of chunks left out because the prompt would not fit (never the same as "pruned").
        notes: what was changed in the text so that it could be tokenized (replaced bytes, trimmed spaces).
    """

    input_ids: tuple[int, ...]
    chunk_ids: tuple[str, ...]
    chunk_spans: tuple[tuple[int, int], ...]
    protected: tuple[bool, ...] = field(repr=False)
    protected_reasons: tuple[str | None, ...]
    sink_tokens: int
    suffix_span: tuple[int, int]
    rendered: str = field(repr=False)
    query_span: tuple[int, int] | None = None
    not_admitted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.input_ids)

    @property
    def chunk_tokens(self) -> tuple[int, ...]:
        """Length of every chunk in tokens."""
        return tuple(end - start for start, end in self.chunk_spans)

    @property
    def removable(self) -> tuple[bool, ...]:
        """Per chunk, whether it may be removed."""
        return tuple(reason is None for reason in self.protected_reasons)

    @property
    def hash(self) -> str:
        """SHA-256 of the token ids: names the prompt without holding its text."""
        return hashlib.sha256(",".join(map(str, self.input_ids)).encode()).hexdigest()
