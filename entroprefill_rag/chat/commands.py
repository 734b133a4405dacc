"""What may be typed besides questions: ``/sources``, ``/audit`` and the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from entroprefill_rag.chat.screen import Screen
from entroprefill_rag.chat.session import ChatSession
from entroprefill_rag.errors import RequestError
from entroprefill_rag.report.plain import one_line
from entroprefill_rag.report.sources import sources_of
from entroprefill_rag.report.terminal import (
    audit_panel,
    claims_text,
    counted,
    layers_table,
    sources_table,
    warnings_text,
)

_LISTED = 50


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        run: does it; what was typed after the name is its last argument.
        text: what it does, for ``/help``.
        takes: what may follow the name.
    """

    run: Callable[[ChatSession, Screen, str], None]
    text: str
    takes: str = ""


class Quit(Exception):
    """The chat is over."""


def run_command(line: str, session: ChatSession, screen: Screen) -> None:
    """Do what a line that begins with ``/`` says.

    Raises:
        RequestError: no such command, or it cannot be done; the message says what can.
        Quit: it was the last one.
    """
    name, _, rest = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise RequestError(
            f"there is no {one_line(name, 40)}; known: {', '.join(COMMANDS)} "
            "(a question that begins with / is asked with a space before it)"
        )
    if rest.strip() and not command.takes:
        raise RequestError(f"{name} takes nothing after it, got {one_line(rest, 40)!r}")
    command.run(session, screen, rest.strip())


def _sources(session: ChatSession, screen: Screen, _: str) -> None:
    exchange = session.asked()
    screen.show(sources_table(sources_of(exchange.record, exchange.request.chunks)))


def _audit(session: ChatSession, screen: Screen, more: str) -> None:
    exchange = session.asked()
    record = exchange.record
    if more not in ("", "all"):
        raise RequestError(f"/audit takes nothing or 'all', got {one_line(more, 40)!r}")
    screen.show(audit_panel(record, exchange.usage, exchange.timings))
    if more and record.trials:
        screen.show(layers_table(record))
    if more:
        screen.show(claims_text(record))
    if (warnings := warnings_text(record)) is not None:
        screen.show(warnings)
    screen.show("")


def _full(session: ChatSession, screen: Screen, _: str) -> None:
    exchange = session.asked()
    full = screen.collect(session.in_full(), "Answering without pruning")
    screen.side_by_side(exchange, full)


def _docs(session: ChatSession, screen: Screen, more: str) -> None:
    if more not in ("", "all"):
        raise RequestError(f"/docs takes nothing or 'all', got {one_line(more, 40)!r}")
    reading = session.index.reading
    chunks = Counter(str(chunk.metadata.get("path", chunk.id)) for chunk in session.index.chunks)
    table = Table(
        title=f"{counted(len(reading.documents), 'document')}, {counted(len(session.index.chunks), 'chunk')}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("document", overflow="fold", ratio=1)
    table.add_column("kind", no_wrap=True)
    table.add_column("chunks", justify="right", no_wrap=True)
    most = None if more else _LISTED
    for document in reading.documents[:most]:
        name = Text(one_line(document.path))
        for text in document.notes:
            name.append(f"\n{one_line(text, 300)}", style="yellow")
        table.add_row(name, document.kind, str(chunks[document.path]))
    screen.show(table)
    if reading.skipped:
        screen.show(Text(f"Not read ({len(reading.skipped)})", style="bold"))
    for skipped in reading.skipped[:most]:
        screen.show(Text(f"{one_line(skipped.path)}: {one_line(skipped.reason, 300)}"))
    if not more and max(len(reading.documents), len(reading.skipped)) > _LISTED:
        screen.show(Text(f"The first {_LISTED} of each; /docs all lists them all.", style="dim"))
    screen.show("")


def _record(session: ChatSession, screen: Screen, name: str) -> None:
    record = session.asked().record
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1]
    if not name:
        raise RequestError("/record needs the name of a file, for example /record record.json")
    path = Path(name).expanduser()
    try:
        # Nothing is written over: a typed name has no second thought.
        with path.open("x", encoding="utf-8") as file:
            file.write(record.to_json(indent=1))
    except FileExistsError as error:
        raise RequestError(f"{one_line(name)!r} exists; give the record another name") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise RequestError(f"{one_line(name)!r} cannot be written: {why}") from error
    screen.note(f"saved; entroprefill show {one_line(name)}")


def _new(session: ChatSession, screen: Screen, _: str) -> None:
    session.forget()
    screen.note("earlier questions and answers are forgotten")


def _help(session: ChatSession, screen: Screen, _: str) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, command in COMMANDS.items():
        grid.add_row(Text(f"{name} {command.takes}".strip()), Text(command.text))
    earlier = "no earlier question"
    if session.remembered:
        earlier = f"up to {counted(session.remembered, 'earlier question')} with their answers"
    about = (
        f"Anything else is a question. At most {session.top_k} chunks are looked up by the question alone; the model "
        f"reads them and {earlier}. Ctrl-C stops an answer."
    )
    screen.show(grid, Text(about, style="dim"), "")


def _quit(session: ChatSession, screen: Screen, _: str) -> None:
    raise Quit


COMMANDS = {
    "/sources": Command(_sources, "what became of each chunk: kept, dropped, protected, and its share of attention"),
    "/audit": Command(_audit, "what was decided and on which numbers; 'all': each layer, and what is claimed", "[all]"),
    "/full": Command(_full, "answer the last question again without pruning, both side by side with times"),
    "/docs": Command(_docs, "the documents in the store, and what was not read and why", "[all]"),
    "/record": Command(_record, "save the last audit record; it holds numbers and names, no text", "FILE"),
    "/new": Command(_new, "forget earlier questions and answers"),
    "/help": Command(_help, "this list"),
    "/quit": Command(_quit, "leave (or Ctrl-D)"),
}
