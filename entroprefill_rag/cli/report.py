"""``entroprefill report``: a record as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from entroprefill_rag.cli.console import guarded, note


@guarded
def report(
    record: Annotated[Path, typer.Argument(help="A record, as `entroprefill ask --record FILE` writes it.")],
    html: Annotated[Path, typer.Option("--html", help="The page to write; a file that is there is replaced.")],
    request: Annotated[
        Path | None,
        typer.Option("--request", help="The request it is about (`ask --save-request`), for titles and scores."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error comes from.")] = False,
) -> None:
    """Write a record as one HTML page: no script, no network, for screen, phone and paper."""
    from entroprefill_rag.cli.inputs import check_outputs, load_record, load_request

    check_outputs({"--html": html})
    loaded = load_record(record)
    chunks = load_request(request).chunks if request is not None else ()
    from entroprefill_rag.report.html import html_report

    html.write_text(html_report(loaded, chunks), encoding="utf-8")
    note(f"Written: {html}")
