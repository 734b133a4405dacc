"""An answer, written while it is made: cleaned of everything that a terminal would obey."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, TYPE_CHECKING, Any

from entroprefill_rag.record import GenerationResult
from entroprefill_rag.report.plain import PlainStream, plain

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import StreamItem


def _nothing() -> None:
    pass


def write_answer(
    items: Iterable[StreamItem] | Iterable[Any], out: IO[str] | None, before_text: Callable[[], None] = _nothing
) -> GenerationResult:
    """Write an answer as it comes, and an empty line after it; one that is given up is called off.

    Args:
        items: of :meth:`LocalBackend.stream`.
        out: where to; None writes nothing.
        before_text: called before each piece (a spinner has to go first).

    Raises:
        RuntimeError: the stream ended without a result.
    """
    from entroprefill_rag.engine.backend import Restarted, TextPiece

    shown = PlainStream()
    result: GenerationResult | None = None
    for item in items:
        if isinstance(item, GenerationResult):
            result = item
        elif out is None:
            continue
        elif isinstance(item, TextPiece):
            before_text()
            out.write(shown.feed(item.text))
            out.flush()
        elif isinstance(item, Restarted):
            # What was printed cannot be taken back, so it is called off and the answer comes again.
            out.write(shown.close() + f"\n\n[not the answer: {plain(item.reason.message)} The answer:]\n\n")
            out.flush()
            shown = PlainStream()
    if result is None:
        raise RuntimeError("the stream ended without a result")
    if out is not None:
        out.write(shown.close() + "\n\n")
        out.flush()
    return result
