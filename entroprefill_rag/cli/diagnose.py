"""``entroprefill diagnose``: how far the pruned run of a request is from the full one, and what the bounds say."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.console import console, guarded, note

if TYPE_CHECKING:
    from rich.table import Table

    from entroprefill_rag.diagnosis import Diagnosis

BUG = 1


@guarded
def diagnose(
    request: Annotated[Path, typer.Argument(help="A request, as `entroprefill ask --save-request FILE` writes it.")],
    model: given.Model = None,
    config: given.Config = None,
    layer: Annotated[
        int | None,
        typer.Option("--layer", help="Prune at this layer, whether the rule accepts it or not.", min=1),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", help="Id of a chunk to remove, with --layer; give it again for more."),
    ] = None,
    seed: given.Seed = None,
    device: given.Device = None,
    dtype: given.DType = None,
    as_json: given.AsJson = False,
    verbose: given.Verbose = False,
) -> None:
    """Run a request in full and pruned, and compare them layer by layer.

    Exits with 1 if a bound that is a theorem failed: a bug.
    """
    from entroprefill_rag.cli import inputs
    from entroprefill_rag.cli.progress import waiting

    settings = inputs.load_config(config, enabled=True, seed=seed)
    asked = inputs.load_request(request)
    with waiting("Loading the model"):
        from entroprefill_rag.diagnosis import diagnose as run
        from entroprefill_rag.engine.backend import LocalBackend

        backend = LocalBackend.from_pretrained(model, device=device, dtype=dtype)
    with closing(backend), waiting("Running in full and pruned"):
        found = run(backend, asked, settings, layer=layer, removed=remove)
    if as_json:
        # Pure ASCII: control characters of an id cannot reach the terminal. An infinite bound is a string in JSON.
        typer.echo(json.dumps(json.loads(found.to_json())))
    else:
        _report(found)
    if not found.fixed_rows_hold:
        note("a bound that is a theorem failed; please report this with the name of the model")
        raise typer.Exit(BUG)


def _report(found: Diagnosis) -> None:
    from rich.text import Text

    from entroprefill_rag.report.plain import one_line

    out = console()
    if found.layers:
        out.print(_table(found))
    for sentence in found.words():
        out.print(Text(one_line(sentence, 1000)))


def _table(found: Diagnosis) -> Table:
    """One line per layer above the pruned one."""
    from rich.table import Table

    table = Table(title="Full run and pruned run", title_justify="left")
    for name in ("layer", "distance", "bound", "token by token", "stretch", "drift", "discards", "fixed row"):
        table.add_column(name, justify="right")
    for one in found.layers:
        tightest = one.fixed_rows.tightest
        table.add_row(
            str(one.layer),
            f"{one.distance:.3g}",
            f"{one.bound:.3g}",
            f"{one.bound_token:.3g}",
            "" if one.lipschitz is None else f"{one.lipschitz:.2f}",
            f"{one.drift:+.2f}",
            f"{max(one.eta):.2f}",
            "" if tightest is None else f"{tightest:.0%}",
        )
    table.caption = (
        "distance: largest of a retained token, l2. bound, token by token: conditional, constants of this request. "
        "stretch, drift: measured, estimates for any other. discards: most that a retained row places on removed "
        "chunks. fixed row: share of the exact bound that is used."
    )
    table.caption_justify = "left"
    return table
