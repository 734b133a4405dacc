"""``entroprefill plan``: what pruning would save and cost, from a model's configuration alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.console import console, guarded, note

if TYPE_CHECKING:
    from rich.table import Table

    from entroprefill_rag.rule.plan import Plan


@guarded
def plan(
    tokens: Annotated[int, typer.Option("--tokens", help="Length of the prompt.", min=1, max=100_000_000)],
    layer: Annotated[int, typer.Option("--layer", help="The layer accepted, counted from 0.", min=0)],
    keep: Annotated[float, typer.Option("--keep", help="Share of the chunks that stays.", min=0.0, max=1.0)] = 0.5,
    model: given.Model = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A model's config.json, instead of --model. No weights are read.")
    ] = None,
    chunks: Annotated[int, typer.Option("--chunks", help="Chunks of the prompt, of equal length.", min=1)] = 20,
    other: Annotated[int, typer.Option("--other-tokens", help="Tokens of instruction, query, template.", min=0)] = 80,
    monitored: Annotated[int, typer.Option("--monitored", help="Layers looked at [J].", min=1)] = 8,
    rows: Annotated[int, typer.Option("--rows", help="Rows read at each, proposal and audit together.", min=1)] = 16,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens in a page of the KV cache.", min=1)] = 16,
    accept_rate: Annotated[
        float, typer.Option("--accept-rate", help="Share of requests at which a layer is accepted.", min=0.0, max=1.0)
    ] = 1.0,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="GB/s from a prefill to a decode machine.")
    ] = None,
    tflops: Annotated[float | None, typer.Option("--tflops", help="10^12 operations a second of the machine.")] = None,
    as_json: given.AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error comes from.")] = False,
) -> None:
    """Predict operations, KV bytes, pages and transfer of a pruned prefill. A prediction, no promise."""
    from entroprefill_rag.engine.shapes import load_config, outline
    from entroprefill_rag.errors import ConfigError
    from entroprefill_rag.rule.plan import kept_positions, plan_prefill

    if model is not None and config is not None:
        raise ConfigError("--config already names the model; leave --model out")
    shape, anatomy = outline(load_config(model, file=config))
    if not 1 <= layer <= shape.layers - 2:
        raise ConfigError(
            f"layer {layer} cannot be accepted: the model has layers 0..{shape.layers - 1}; choose from "
            f"1..{shape.layers - 2}"
        )
    try:
        found = plan_prefill(
            shape,
            tokens=tokens,
            layer=layer,
            kept=kept_positions(tokens, keep=keep, chunks=chunks, other=other),
            monitored=monitored,
            rows=rows,
            page=page_size,
            accept_rate=accept_rate,
            bytes_per_second=None if bandwidth is None else bandwidth * 1e9,
            flops_per_second=None if tflops is None else tflops * 1e12,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if as_json:
        told: dict[str, Any] = {"model": asdict(shape), "plan": asdict(found)}
        told["why_not"] = None if anatomy.why_not is None else anatomy.why_not.model_dump()
        typer.echo(json.dumps(told))
        return
    if anatomy.why_not is not None:
        note(f"note: {anatomy.why_not.message}")
    console().print(_table(found))


def _table(found: Plan) -> Table:
    from rich.table import Table

    table = Table(
        title=f"{found.tokens:,} tokens, {found.kept_tokens:,} kept above layer {found.layer}", title_justify="left"
    )
    table.add_column("")
    for name in ("full", "pruned", "saved"):
        table.add_column(name, justify="right")

    def pair(name: str, both: tuple[float, float] | None, scale: float, unit: str) -> None:
        if both is not None:
            full, pruned = both
            share = f"{1 - pruned / full:.1%}" if full else ""
            table.add_row(f"{name}, {unit}", f"{full / scale:,.4g}", f"{pruned / scale:,.4g}", share)

    pair("prefill (looking included)", (found.full_flops, found.pruned_flops), 1e12, "TFLOP")
    pair("prefill time", found.prefill_seconds, 1e-3, "ms")
    pair(f"KV cache of a layer above {found.layer}", found.kv_bytes_per_layer, 2**20, "MiB")
    pair("KV cache, all layers", found.kv_bytes, 2**20, "MiB")
    pair("transfer to a decode machine", found.transfer_bytes, 2**20, "MiB")
    pair("transfer time", found.transfer_seconds, 1e-3, "ms")
    for name, freed in (
        ("compacted", found.pages_freed_compacted),
        ("left in place", found.pages_freed_in_place),
        ("one block table for all layers", found.pages_freed_shared_table),
    ):
        pair(f"pages of {found.page}, {name}", (found.pages, found.pages - freed), 1, "pages")
    table.add_section()
    table.add_row("looking, share of a full prefill", "", f"{found.scoring_flops / found.full_flops:.3%}", "")
    table.add_row("rows of one layer in float32, MiB", "", f"{found.scoring_bytes / 2**20:,.4g}", "")
    table.add_row("gather, read and written, MiB", "", f"{found.gather_bytes / 2**20:,.4g}", "")
    table.add_row("predicted speed-up of the prefill", "", f"{found.speedup:.3f}", "")
    expected = f"{found.expected_speedup:.3f}"
    table.add_row(f"expected, where {found.accept_rate:.0%} of requests are pruned", "", expected, "")
    table.add_row("largest kept share that costs nothing", "", _share(found.break_even_kept_share), "")
    table.add_row("least accept rate that costs nothing", "", _share(found.break_even_accept_rate), "")
    table.caption = "Operations and bytes, counted. Kernels, fixed costs and what is accepted are not in it."
    table.caption_justify = "left"
    return table


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.2%}"
