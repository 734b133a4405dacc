"""``entroprefill verify`` and ``sign``: whether a record's numbers follow from each other, and who vouches for them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.console import console, guarded

if TYPE_CHECKING:
    from rich.table import Table

    from entroprefill_rag.record import AuditRecord
    from entroprefill_rag.verify import Finding

FOUND = 1

RecordFile = Annotated[Path, typer.Argument(help="A record, as `entroprefill ask --record FILE` writes it.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show where an error comes from.")]


@guarded
def verify(
    record: RecordFile,
    request: Annotated[
        Path | None,
        typer.Option("--request", help="Its request (`ask --save-request`): run it again and compare. Needs a model."),
    ] = None,
    model: given.Model = None,
    device: given.Device = None,
    dtype: given.DType = None,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="Also check the signature in RECORD.sig with the key in this file."),
    ] = None,
    as_json: given.AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Recompute a record's numbers from each other, and list what does not follow.

    Exits with 0 where everything follows, 1 where something does not, 2 where there is nothing to check.
    """
    from entroprefill_rag.cli.inputs import load_record
    from entroprefill_rag.verify import LIMITS, check

    loaded = load_record(record)
    found = check(loaded)
    if key_file is not None:
        found += _unsigned(record, loaded, key_file)
    if request is not None:
        found += _replayed(loaded, request, model, device, dtype)
    limits = [limit for limit in LIMITS if limit.where(loaded)]
    if as_json:
        told: dict[str, Any] = {"follows": not found, "findings": [asdict(one) for one in found]}
        told |= {"replayed": request is not None, "signed": key_file is not None}
        told["cannot_know"] = [{"what": limit.what, "why": limit.why} for limit in limits]
        typer.echo(json.dumps(told, default=str))
    else:
        _report(found, limits, replayed=request is not None)
    if found:
        raise typer.Exit(FOUND)


@guarded
def sign(
    record: RecordFile,
    key_file: Annotated[Path, typer.Option("--key-file", help="File that holds the shared key, at least 16 bytes.")],
    verbose: Verbose = False,
) -> None:
    """Sign a record with a shared key: writes RECORD.sig, which `verify --key-file` checks."""
    from entroprefill_rag.cli.inputs import load_record
    from entroprefill_rag.verify.signature import read_key, signature_file
    from entroprefill_rag.verify.signature import sign as signature_of

    signature_file(record).write_text(signature_of(load_record(record), read_key(key_file)) + "\n", encoding="ascii")


def _unsigned(path: Path, record: AuditRecord, key_file: Path) -> list[Finding]:
    from entroprefill_rag.verify import Finding
    from entroprefill_rag.verify.signature import read_key, signature_file, signed

    file = signature_file(path)
    if signed(record, file.read_text(encoding="utf-8"), read_key(key_file)):
        return []
    return [Finding("(signature)", file.name, "another", "the record, or the key, is not the one that was signed")]


def _replayed(
    record: AuditRecord, request: Path, model: str | None, device: str | None, dtype: str | None
) -> list[Finding]:
    from entroprefill_rag.cli.inputs import load_request
    from entroprefill_rag.cli.progress import waiting
    from entroprefill_rag.verify import replay

    asked = load_request(request)
    with waiting("Loading the model"):
        from entroprefill_rag.engine.backend import LocalBackend

        backend = LocalBackend.from_pretrained(model, device=device, dtype=dtype, ledger=False)
    with closing(backend), waiting("Running the request again"):
        return replay(record, asked, backend)


def _report(found: list[Finding], limits: list[Any], *, replayed: bool) -> None:
    from rich.text import Text

    out = console()
    if found:
        out.print(_table(found))
        out.print(Text(f"{len(found)} of the record's numbers do not follow.", style="red"))
    else:
        again = "; run again, it came out the same" if replayed else ""
        out.print(Text(f"Every derived number follows from the others{again}.", style="green"))
    out.print(Text("What a record alone cannot show:", style="bold"))
    for limit in limits:
        out.print(Text(f"- {limit.what}{f': {limit.why}' if limit.why else ''}", style="dim"))


def _table(found: list[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from entroprefill_rag.report.plain import one_line

    table = Table(title="Findings", title_justify="left")
    for name in ("field", "recorded", "follows", "rule"):
        table.add_column(name, overflow="fold")
    for one in found:
        table.add_row(*(Text(one_line(str(part), 300)) for part in (one.path, one.recorded, one.follows, one.rule)))
    return table
