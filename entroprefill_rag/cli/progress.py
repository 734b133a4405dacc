"""Progress on stderr: bars and spinners at a terminal, nothing in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from entroprefill_rag.cli.console import console

_STAGES = {"reading": "Reading documents", "embedding": "Embedding chunks", "searching": "Searching"}


@contextmanager
def index_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for :meth:`FolderIndex.open`; gone when the block ends."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    err = console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        tasks = {}

        def told(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES.get(stage, stage), total=None)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield told


@contextmanager
def waiting(text: str) -> Iterator[Callable[[], None]]:
    """A spinner until the block ends or the function it gives is called."""
    from rich.text import Text

    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda: None
        return
    status = err.status(Text(text))
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()
