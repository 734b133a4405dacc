"""A prompt as text the tokenizer can encode, cut where a token boundary is needed, before any token is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from entroprefill_rag.engine.prompt_style import PromptStyle
from entroprefill_rag.engine.segments import LONE_SURROGATE, Control, SegmentTokenizer
from entroprefill_rag.engine.skeleton import Part, skeleton
from entroprefill_rag.request import Chunk, RagRequest

Atom = str | Control

_MOST_NAMED = 5


@dataclass(frozen=True)
class Written:
    """A prompt cut into stretches of text and control tokens.

    Attributes:
        bos: ids that the tokenizer puts before a text, where the template does not write them itself.
        before: what comes before the first chunk; no two stretches of text touch.
        separator: between chunks.
        bodies: per chunk, header and text; empty where there is nothing to show.
        after: what comes after the last chunk.
        query: where the query is in ``after``: which stretch, and from which to which character of it; None for a query
            that cannot be encoded at all.
        notes: what was replaced, without quoting it.
    """

    bos: tuple[int, ...]
    before: list[Atom]
    separator: str
    bodies: list[str]
    after: list[Atom]
    query: tuple[int, int, int] | None
    notes: tuple[str, ...]


def write(request: RagRequest, style: PromptStyle, segments: SegmentTokenizer) -> Written:
    """Write ``request`` in ``style``; control tokens come from the template alone.

    Raises:
        TemplateError: a template that cannot hold the request with all documents before the query.
    """
    parts, from_chat_template = skeleton(request, style, segments.tokenizer)
    where = next(index for index, part in enumerate(parts) if part.kind == "context")
    before, after = _pieces(parts[:where], segments), _pieces(parts[where + 1 :], segments)
    bodies: list[tuple[Atom, str]] = [
        (_body(chunk, style, number), f"chunk {chunk.id!r}") for number, chunk in enumerate(request.chunks, start=1)
    ]
    pieces = [*before, (style.separator, "template"), *bodies, *after]
    atoms, notes = _clean(pieces, segments)
    head, tail = len(before), len(before) + 1 + len(bodies)
    prefix = _joined(atoms[:head])
    written_bos = bool(prefix) and isinstance(prefix[0], Control) and (prefix[0].id,) == segments.bos[:1]
    return Written(
        bos=() if from_chat_template or written_bos else segments.bos,
        before=prefix,
        separator=str(atoms[head]),
        bodies=[str(atom) for atom in atoms[head + 1 : tail]],
        after=_joined(atoms[tail:]),
        query=_place_of("query", atoms[tail:], [source for _, source in after]),
        notes=notes,
    )


def _body(chunk: Chunk, style: PromptStyle, number: int) -> str:
    # Blank text under no title: nothing to announce, so no header either, and the chunk has no tokens.
    return style.header(chunk, number) + chunk.text if chunk.text.strip() or chunk.title else ""


def _pieces(parts: Iterable[Part], segments: SegmentTokenizer) -> list[tuple[Atom, str]]:
    pieces: list[tuple[Atom, str]] = []
    for part in parts:
        atoms = segments.split_controls(part.text) if part.kind == "template" else [part.text]
        pieces += [(atom, part.source) for atom in atoms]
    return pieces


def _clean(pieces: Sequence[tuple[Atom, str]], segments: SegmentTokenizer) -> tuple[list[Atom], tuple[str, ...]]:
    cleaned = iter(segments.clean([atom for atom, _ in pieces if isinstance(atom, str)]))
    atoms: list[Atom] = []
    replaced: list[tuple[str, Counter[str]]] = []
    for atom, source in pieces:
        if isinstance(atom, str):
            clean = next(cleaned)
            atoms.append(clean.text)
            replaced.append((source, clean.replaced))
        else:
            atoms.append(atom)
    return atoms, tuple(_notes(replaced, segments.substitute))


def _notes(replaced: Sequence[tuple[str, Counter[str]]], substitute: str) -> Iterator[str]:
    """What was replaced and where: counts, code points and ids of chunks, never the text."""
    lone = sum(counts[LONE_SURROGATE] for _, counts in replaced)
    if lone:
        where = _some([source for source, counts in replaced if counts[LONE_SURROGATE]])
        yield f"{lone} lone surrogate(s), which are not characters, replaced by U+FFFD in {where}"
    rest = [(source, +Counter({k: n for k, n in counts.items() if k != LONE_SURROGATE})) for source, counts in replaced]
    total = sum((counts for _, counts in rest), Counter())
    if total:
        points = _some([f"U+{ord(character):04X}" for character in sorted(total)])
        where = _some([source for source, counts in rest if counts])
        yield (
            f"{total.total()} character(s) that the tokenizer cannot encode ({points}) "
            f"{'replaced by U+' + format(ord(substitute), '04X') if substitute else 'left out'} "
            f"(white space by a space) in {where}"
        )


def _some(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = len(unique) - _MOST_NAMED
    return ", ".join(unique[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _place_of(source: str, atoms: Sequence[Atom], sources: Sequence[str]) -> tuple[int, int, int] | None:
    """Where the last text of a source comes to lie among joined atoms: stretch, first character, one past the last."""
    found = None
    for index, (atom, own) in enumerate(zip(atoms, sources, strict=True)):
        if own == source and isinstance(atom, str) and atom:
            to_here = _joined(atoms[: index + 1])
            end = len(str(to_here[-1]))
            found = len(to_here) - 1, end - len(atom), end
    return found


def _joined(atoms: Iterable[Atom]) -> list[Atom]:
    """Join stretches of text that touch: within one, words are cut into tokens as in any text."""
    result: list[Atom] = []
    for atom in atoms:
        if isinstance(atom, str) and result and isinstance(result[-1], str):
            result[-1] += atom
        elif atom != "":
            result.append(atom)
    return result
