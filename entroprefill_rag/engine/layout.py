"""A request as token ids: prefix, chunks with delimiters between them, suffix (section 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from entroprefill_rag.engine.overflow import admit
from entroprefill_rag.engine.prompt_style import DEFAULT_INSTRUCTION, PromptStyle
from entroprefill_rag.engine.segments import Control, SegmentTokenizer
from entroprefill_rag.engine.written import Atom, Written, write
from entroprefill_rag.errors import EntroPrefillError
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.request import Chunk, RagRequest

__all__ = ["DEFAULT_INSTRUCTION", "PromptStyle", "SegmentTokenizer", "build_layout"]

# Why a chunk is protected.
CALLER, EMPTY, SINKS = "caller", "empty", "sinks"


def build_layout(
    request: RagRequest,
    tokenizer: Any,
    *,
    style: PromptStyle | None = None,
    sink_tokens: int,
    max_positions: int | None,
    reserve: int = 0,
    overflow: Literal["error", "drop_last"] = "error",
) -> PromptLayout:
    """Lay out a request. Safe to call from many threads.

    Args:
        request: instruction, history, chunks, query.
        tokenizer: a tokenizer of transformers, or the :class:`SegmentTokenizer` of one (saves reading it each time).
        style: the words around the documents.
        sink_tokens: first tokens of the prompt that are protected; a chunk they reach into is protected whole.
        max_positions: most tokens the model can place; None for no limit.
        reserve: positions to leave free for generated tokens.
        overflow: what to do with a prompt that is too long: refuse it, or leave out chunks from the last one.

    Returns:
        The layout. A chunk is protected because of ``"caller"``, ``"empty"`` (it has no tokens) or ``"sinks"``.

    Raises:
        TemplateError: a template that cannot hold the request with all documents before the query.
        PromptOverflowError: the prompt does not fit.
        ConfigError: a tokenizer that does not say which of its tokens are special.
    """
    segments = tokenizer if isinstance(tokenizer, SegmentTokenizer) else SegmentTokenizer(tokenizer)
    written = write(request, style or PromptStyle(), segments)
    prefix, delimiter, bodies, suffix, query = _encode(written, segments)
    admitted = admit(
        [len(body) for body in bodies],
        [chunk.protected for chunk in request.chunks],
        fixed=len(prefix) + len(suffix),
        delimiter=len(delimiter),
        max_positions=max_positions,
        reserve=reserve,
        drop=overflow == "drop_last",
    )
    ids, spans = list(prefix), []
    for index in admitted:
        if bodies[index] and len(ids) > len(prefix):
            ids += delimiter
        spans.append((len(ids), len(ids) + len(bodies[index])))
        ids += bodies[index]
    suffix_span = (len(ids), len(ids) + len(suffix))
    ids += suffix
    reasons = [_reason(request.chunks[index], span, sink_tokens) for index, span in zip(admitted, spans, strict=True)]
    rendered = _rendered(written, admitted, segments)
    return PromptLayout(
        input_ids=tuple(ids),
        chunk_ids=tuple(request.chunks[index].id for index in admitted),
        chunk_spans=tuple(spans),
        protected=_protected(len(ids), spans, reasons),
        protected_reasons=tuple(reasons),
        sink_tokens=sink_tokens,
        suffix_span=suffix_span,
        query_span=(suffix_span[0] + query[0], suffix_span[0] + query[1]) if query is not None else None,
        rendered=rendered,
        not_admitted=tuple(request.chunks[index].id for index in sorted(set(range(len(bodies))).difference(admitted))),
        notes=(*written.notes, *_decoding_notes(rendered, segments.decode(ids))),
    )


def _encode(
    written: Written, segments: SegmentTokenizer
) -> tuple[list[int], list[int], list[list[int]], list[int], tuple[int, int] | None]:
    """Ids of prefix, delimiter, chunks and suffix, and where in the suffix the query is; one call to the tokenizer."""
    atoms: list[Atom] = [*written.before, *written.bodies, *written.after]
    joined = list(_continues(atoms, segments))
    head, tail = len(written.before), len(written.before) + len(written.bodies)
    texts, continues = [written.separator], [True]
    for atom, continued in zip(atoms, joined, strict=True):
        if isinstance(atom, str):
            texts.append(atom)
            continues.append(continued)
    if written.query is not None:
        stretch, *cuts = written.query
        texts += [str(written.after[stretch])[:cut] for cut in cuts]
        continues += [joined[tail + stretch]] * 2
    rows = iter(segments.encode(texts, continues))
    delimiter = _checked(next(rows), segments)
    encoded = [[atom.id] if isinstance(atom, Control) else _checked(next(rows), segments) for atom in atoms]
    prefix = [*written.bos, *(token for ids in encoded[:head] for token in ids)]
    after = encoded[tail:]
    query = None
    if written.query is not None:
        before = sum(map(len, after[: written.query[0]]))
        start, end = (before + _shared(cut, after[written.query[0]]) for cut in rows)
        query = (start, end) if start < end else None
    return prefix, delimiter, encoded[head:tail], [token for ids in after for token in ids], query


def _shared(part: Sequence[int], whole: Sequence[int]) -> int:
    """How many first tokens are the same: a word may be cut otherwise where a text ends before it."""
    return next((at for at, pair in enumerate(zip(part, whole, strict=False)) if pair[0] != pair[1]), len(part))


def _continues(atoms: Sequence[Atom], segments: SegmentTokenizer) -> Iterator[bool]:
    """Per atom, whether it continues a text; what begins the prompt does not."""
    previous: Atom = ""
    for atom in atoms:
        yield not segments.begins_after_control if isinstance(previous, Control) else bool(previous)
        previous = atom or previous


def _checked(ids: list[int], segments: SegmentTokenizer) -> list[int]:
    """Last line of defence: no control token of the model came out of text."""
    found = segments.forbidden.intersection(ids)
    if found:
        raise EntroPrefillError(
            f"internal: text produced the control tokens {sorted(found)[:5]}, which only a template may; please report "
            f"this with the name of the tokenizer ({type(segments.tokenizer).__name__})"
        )
    return ids


def _reason(chunk: Chunk, span: tuple[int, int], sink_tokens: int) -> str | None:
    start, end = span
    if chunk.protected:
        return CALLER
    if start == end:
        return EMPTY
    return SINKS if start < sink_tokens else None


def _protected(length: int, spans: Sequence[tuple[int, int]], reasons: Sequence[str | None]) -> tuple[bool, ...]:
    protected = [True] * length
    for (start, end), reason in zip(spans, reasons, strict=True):
        if reason is None:
            protected[start:end] = [False] * (end - start)
    return tuple(protected)


def _rendered(written: Written, admitted: Sequence[int], segments: SegmentTokenizer) -> str:
    before, after = (
        "".join(atom if isinstance(atom, str) else atom.text for atom in atoms)
        for atoms in (written.before, written.after)
    )
    bos = segments.decode(written.bos) if written.bos else ""
    bodies = [written.bodies[index] for index in admitted if written.bodies[index]]
    return bos + before + written.separator.join(bodies) + after


def _decoding_notes(rendered: str, decoded: str) -> Iterator[str]:
    """Say where decoding the ids does not give the prompt back; that is the tokenizer's own doing."""
    if decoded == rendered:
        return
    pairs = zip(rendered, decoded, strict=False)
    first = next(
        (index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(rendered), len(decoded))
    )
    only_spaces = "".join(rendered.replace("▁", " ").split()) == "".join(decoded.replace("▁", " ").split())
    what = "in spaces only" if only_spaces else "as its normaliser rewrites the text"
    yield f"the tokenizer decodes this prompt differently from character {first} on, {what}"
