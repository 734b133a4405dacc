"""``entroprefill show``: a record as a report in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from entroprefill_rag.cli.console import console, guarded


@guarded
def show(
    record: Annotated[Path, typer.Argument(help="A record, as `entroprefill ask --record FILE` writes it.")],
    request: Annotated[
        Path | None,
        typer.Option("--request", help="The request it is about (`ask --save-request`), for titles and scores."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error comes from.")] = False,
) -> None:
    """Show a record: sources, audit, every layer that was tried, and what is claimed."""
    from entroprefill_rag.cli.inputs import load_record, load_request
    from entroprefill_rag.report.terminal import record_report

    loaded = load_record(record)
    chunks = load_request(request).chunks if request is not None else ()
    console().print(record_report(loaded, chunks))
