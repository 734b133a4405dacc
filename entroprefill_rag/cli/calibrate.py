"""``entroprefill calibrate``: which layers and heads of a model find evidence, measured without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.console import console, guarded, note

if TYPE_CHECKING:
    from rich.table import Table

    from entroprefill_rag.calibration.profile import ModelProfile


@guarded
def calibrate(
    model: given.Model = None,
    docs: Annotated[
        Path | None,
        typer.Option("--docs", help="Make the training questions from these documents; default: packaged passages."),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option("--requests", help="Or from the chunks of these requests: JSON lines, as --save-request writes."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the profile to this file, for LocalBackend(profile=FILE).")
    ] = None,
    questions: Annotated[int, typer.Option("--questions", help="Training questions; more is surer.", min=20)] = 60,
    seed: Annotated[int, typer.Option("--seed", help="Of the questions, folds and intervals.", min=0)] = 0,
    device: given.Device = None,
    dtype: given.DType = None,
    as_json: given.AsJson = False,
    verbose: given.Verbose = False,
) -> None:
    """Find the layers and heads of a model that attend to evidence, and write them to a profile.

    A profile decides which layers are looked at and in which order chunks are tried. Caps and audits hold with any.
    """
    from entroprefill_rag.calibration.run import calibrate as run
    from entroprefill_rag.calibration.run import training_questions
    from entroprefill_rag.cli import inputs
    from entroprefill_rag.cli.progress import waiting

    inputs.check_outputs({"--out": out})
    made, source = training_questions(docs=docs, requests=requests, count=questions, seed=seed)
    if len(made) < questions:
        note(f"note: these texts give {len(made)} questions, not {questions}")
    with waiting("Loading the model"):
        from entroprefill_rag.engine.backend import LocalBackend

        backend = LocalBackend.from_pretrained(model, device=device, dtype=dtype, profile=False)
    with closing(backend), _counting("Measuring") as told:
        profile = run(backend, made, source=source, seed=seed, progress=told)
    if profile.training.questions < len(made):
        note(f"note: {len(made) - profile.training.questions} questions did not fit the model")
    if out is not None:
        out.write_text(profile.to_json(), encoding="utf-8")
    if as_json:
        typer.echo(profile.model_dump_json())
        return
    _report(profile)
    if out is None:
        note("note: nothing was written; give --out FILE to keep the profile")


@contextmanager
def _counting(text: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, gone when the block ends; a line for every tenth part where there is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    err = console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        task = bars.add_task(text, total=None)

        def told(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)
            if not err.is_terminal and done % max(1, total // 10) == 0:
                note(f"{text}: {done} of {total}")

        yield told


def _report(profile: ModelProfile) -> None:
    from rich.text import Text

    from entroprefill_rag.report.plain import one_line

    out = console()
    out.print(_table(profile))
    caps = ", ".join(f"{float(saving):.0%}: {cap:g}" for saving, cap in profile.caps.items()) or "none up to 1"
    lines = (
        f"Profile {profile.name}: {profile.training.questions} questions, chance {profile.training.chance:.2f}.",
        f"Monitored layers: {', '.join(map(str, profile.layers))}; mass_min {profile.mass_min:g}, mu_min "
        f"{profile.mu_min:g}.",
        f"Caps at which half of the questions reach a saving: {caps}. They are not applied: set eps_row yourself.",
    )
    for line in lines:
        out.print(Text(one_line(line, 1000)))


def _table(profile: ModelProfile) -> Table:
    """One line per layer."""
    from rich.table import Table

    table = Table(title="Recall of gold at a quarter of the chunks", title_justify="left")
    for name in ("layer", "documents", "all heads", "renyi", "own", "pooled", "95%", "saved", "kept"):
        table.add_column(name, justify="right")
    for one in profile.evidence:
        at = next((curve for curve in one.caps if curve.cap == 0.2), None)
        table.add_row(
            f"{'*' if one.layer in profile.layers else ''}{one.layer}",
            f"{one.doc_mass:.2f}",
            f"{one.uniform.mean:.2f}",
            f"{one.renyi.mean:.2f}",
            f"{one.profile.mean:.2f}",
            f"{one.pooled.mean:.2f}",
            f"{one.pooled.low:.2f}-{one.pooled.high:.2f}",
            "" if at is None else f"{at.saved:.0%}",
            "" if at is None else f"{at.gold_kept:.2f}",
        )
    table.caption = (
        "*: monitored. documents: mean attention on them. own: heads of the layer, pooled: of it and of earlier ones, "
        "both chosen on other questions. saved, kept: chunk tokens removed and gold kept under caps of 0.2, target one "
        "half, ranked by the pooled heads."
    )
    table.caption_justify = "left"
    return table
