"""Where a chat reads and writes: a terminal with prompts and colours, or a pipe without either."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from entroprefill_rag.cli.console import console, note
from entroprefill_rag.cli.progress import waiting
from entroprefill_rag.report.plain import one_line, plain
from entroprefill_rag.report.sources import Source, sources_of
from entroprefill_rag.report.streamed import write_answer
from entroprefill_rag.report.terminal import counted, verdict_line

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import RenderableType

    from entroprefill_rag.chat.session import Exchange
    from entroprefill_rag.engine.streaming import StreamItem
    from entroprefill_rag.record import GenerationResult, Timings, Usage

_PROMPT = "> "
_CITED = re.compile(r"\[(\d{1,3})\]")


class Screen:
    """Standard input and output; answers and what is asked for go to stdout, notes and errors to stderr.

    Attributes:
        interactive: whether somebody types.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            # A question in another encoding is better asked with gaps than not at all.
            sys.stdin.reconfigure(errors="replace")
        if self.interactive:
            with contextlib.suppress(ImportError):  # not on every platform; then without arrow keys
                import readline  # noqa: F401

    def read(self) -> str | None:
        """The next line, without its end; None where there are no more."""
        if sys.stdin is None:  # closed by who started it
            return None
        if not self.interactive:
            line = sys.stdin.readline()
            return line.rstrip("\r\n").removeprefix("\ufeff") if line else None
        try:
            if sys.stdout.isatty():
                return input(_PROMPT)
            sys.stderr.write(_PROMPT)
            sys.stderr.flush()
            return input()
        except EOFError:
            sys.stderr.write("\n")
            return None

    def show(self, *parts: RenderableType) -> None:
        """Print to stdout; strings are taken literally and must be safe already."""
        out = console()
        for part in parts:
            out.print(part)
        out.file.flush()

    def note(self, text: str) -> None:
        """A line for the person, on stderr."""
        note(text)

    def error(self, text: str) -> None:
        """What went wrong, in one line on stderr."""
        sys.stdout.flush()
        sys.stderr.write(f"entroprefill: {text}\n")
        sys.stderr.flush()

    def stopped(self) -> None:
        """End the line that an interrupt has cut."""
        if self.interactive:
            self.show("")
        self.note("stopped; Ctrl-C again, Ctrl-D or /quit leaves" if self.interactive else "stopped")

    def answer(self, stream: Generator[StreamItem, Any, Any]) -> GenerationResult:
        """Write an answer as it comes."""
        with closing(stream), waiting("Reading the documents") as stop_waiting:
            return write_answer(stream, console().file, stop_waiting)

    def collect(self, stream: Generator[StreamItem, Any, Any], text: str) -> GenerationResult:
        """An answer that is shown later, with a spinner meanwhile."""
        with closing(stream), waiting(text):
            return write_answer(stream, None)

    def citations(self, exchange: Exchange) -> None:
        """The retained sources by their numbers in the prompt, which of them the answer names, and what is gone."""
        sources = sources_of(exchange.record, exchange.request.chunks)
        kept = [source for source in sources if source.status in ("kept", "protected")]
        named = {int(number) for number in _CITED.findall(exchange.answer or "")}
        self.show(_numbered(kept, named), Text(_in_short(exchange, len(sources)), style="dim"))
        for line in _wrong_numbers(sources, named):
            self.show(Text(line, style="yellow"))
        if exchange.left_out:
            self.note(f"{counted(exchange.left_out, 'earlier question')} did not fit beside the documents")
        self.show("")

    def side_by_side(self, exchange: Exchange, full: GenerationResult) -> None:
        """The last answer beside the one without pruning, with the times of both runs."""
        table = Table(box=box.ROUNDED, show_lines=True)
        table.add_column("", style="bold", no_wrap=True)
        table.add_column(exchange.record.outcome, ratio=1, overflow="fold")
        table.add_column("without pruning", ratio=1, overflow="fold")
        done = exchange.answer is not None
        rows: list[tuple[str, str, str]] = [
            ("answer", plain(exchange.answer or "(stopped)").strip(), plain(full.answer).strip()),
            ("first token", f"{exchange.timings.first_token:.2f} s", f"{full.timings.first_token:.2f} s"),
            ("total", _total(exchange.timings, exchange.usage), _total(full.timings, full.usage)),
            ("upper layers", _upper(exchange.usage), _upper(full.usage)),
        ]
        for name, one, other in rows:
            table.add_row(name, Text(one), Text(other))
        same = "" if not done else f"The answers {'are the same' if exchange.answer == full.answer else 'differ'}. "
        self.show(
            table, Text(f"{same}One run each on this machine, the first answer of a chat warms up.", style="dim"), ""
        )


def _total(timings: Timings, usage: Usage | None) -> str:
    if usage is None:
        return "stopped"
    return f"{timings.first_token + timings.decode:.2f} s for {counted(usage.generated_tokens, 'token')}"


def _upper(usage: Usage | None) -> str:
    return "" if usage is None else f"{usage.kept_tokens:,} of {usage.prompt_tokens:,} prompt tokens"


def _numbered(kept: Sequence[Source], named: set[int]) -> RenderableType:
    if not kept:
        return Text("No sources.", style="dim")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold", style="dim")
    for source in kept:
        title, path = one_line(source.title, 90), one_line(source.path or source.id, 90)
        cited = " (named in the answer)" if source.number in named else ""
        about = f"{'' if title == path else title}{cited}"
        grid.add_row(Text(f"[{source.number}]", style="bold" if cited else ""), Text(path), Text(about))
    return grid


def _in_short(exchange: Exchange, sources: int) -> str:
    record = exchange.record
    if record.outcome == "pruned":
        what = f"{len(record.dropped_ids)} of {counted(sources, 'chunk')} dropped after layer {record.accepted_layer}"
    else:
        what = f"{record.outcome}, nothing dropped: {verdict_line(record.reason)}"
    total = "" if exchange.usage is None else f", {exchange.timings.first_token + exchange.timings.decode:.2f} s in all"
    return f"{what}; first token {exchange.timings.first_token:.2f} s{total}"


def _wrong_numbers(sources: Sequence[Source], named: set[int]) -> Iterable[str]:
    """What an answer names that it cannot stand on; whether a source supports the answer is not checked."""
    status = {source.number: source.status for source in sources}
    for number in sorted(named):
        if status.get(number) == "dropped":
            yield f"note: the answer names [{number}], which was dropped"
        elif number not in status:
            yield f"note: the answer names [{number}], which is the number of no source"
