"""``entroprefill observers``: how many observers an audit takes, for each bound."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.console import console, guarded


@guarded
def observers(
    delta: Annotated[float, typer.Option("--delta", help="Probability of accepting falsely, shared by all.")] = 0.05,
    as_json: given.AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error comes from.")] = False,
) -> None:
    """Smallest number of observers that passes: by bound, mean loss, limit and statements (docs/observers.md)."""
    from rich import box
    from rich.table import Table

    from entroprefill_rag.errors import ConfigError
    from entroprefill_rag.rule.draws import EPS_AUDITS, STATEMENTS, Needed, observers_table

    if not 0.0 < delta < 1.0:
        raise ConfigError(f"delta must lie in (0, 1), got {delta}")
    cells = observers_table(delta)
    if as_json:
        typer.echo(json.dumps([asdict(cell) for cell in cells]))
        return
    rows: dict[tuple[float, str, str], list[Needed]] = {}
    for cell in sorted(cells, key=lambda cell: cell.eta_hat):
        rows.setdefault((cell.eta_hat, cell.bound, cell.losses), []).append(cell)
    table = Table(
        title=f"Smallest m_a that passes, delta = {delta:g}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    for name in ("mean", "bound"):
        table.add_column(name, no_wrap=True)
    for eps in EPS_AUDITS:
        counts = " ".join(f"{count:>4}" for count in STATEMENTS)
        table.add_column(f"eps_audit {eps:g}\n{counts}", justify="right", no_wrap=True)
    for (eta, bound, losses), found in rows.items():
        numbers = ["-" if one.m is None else str(one.m) for one in found]
        size = len(STATEMENTS)
        parts = [" ".join(f"{one:>4}" for one in numbers[i * size : (i + 1) * size]) for i in range(len(EPS_AUDITS))]
        name = bound.removeprefix("empirical_") + (", 0/1" if losses == "zero_one" else "")
        table.add_row(f"{eta:g}", name, *parts)
    table.caption = (
        "Columns: J * H_Q statements that share delta. Every observer loses the mean; in lines with 0/1, all of its "
        "attention or nothing. Other losses of that mean, in no particular order, lie between."
    )
    table.caption_justify = "left"
    console().print(table)
