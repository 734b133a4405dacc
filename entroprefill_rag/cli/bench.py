"""``entroprefill bench``: pruning in mid-prefill beside what one would do instead, on labelled questions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.console import console, guarded, note

if TYPE_CHECKING:
    from entroprefill_rag.bench.methods import Method
    from entroprefill_rag.bench.questions import Question
    from entroprefill_rag.bench.rankers import Ranker
    from entroprefill_rag.engine.backend import LocalBackend

DATA = Path("benchmarks/data/bench.jsonl")
QUICK_MINUTES = 5.0


@guarded
def bench(
    model: given.Model = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help=f"Labelled questions as JSON lines; again for more files. Default: {DATA}."),
    ] = None,
    questions: Annotated[
        int | None, typer.Option("--questions", help="At most so many, taken from the sets in turn.", min=1)
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="Names with commas between; the full run is always among them.")
    ] = None,
    cross_encoder: Annotated[
        list[str] | None, typer.Option("--cross-encoder", help="Hub id or folder; again for more of them.")
    ] = None,
    embedder: given.EmbedderName = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for rows and report; a rerun goes on there.")] = Path(
        "bench-report"
    ),
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Begin no question that would probably end later.", min=0.1)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Five minutes: a choice of methods, cut short.")] = False,
    budget: Annotated[
        float, typer.Option("--budget", help="Share of the chunk tokens that a method may keep.", min=0.1, max=0.9)
    ] = 0.5,
    layer: Annotated[
        int | None,
        typer.Option("--layer", help="Where attention chooses, for the methods of other papers. Default: 60% up."),
    ] = None,
    max_new_tokens: given.MaxNewTokens = 32,
    seed: Annotated[int, typer.Option("--seed", help="Of orders, random chunks and audits.", min=0)] = 0,
    device: given.Device = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16, float16; default: the checkpoint's.")
    ] = None,
    report_only: Annotated[
        Path | None, typer.Option("--report-only", help="Run nothing; make the report of this folder anew.")
    ] = None,
    docs: Annotated[
        Path | None, typer.Option("--docs", help="Write benchmark.md and what it needs into this folder too.")
    ] = None,
    verbose: given.Verbose = False,
) -> None:
    """Compare methods on labelled questions: quality, time to the first token, memory; with intervals.

    Rows are appended as they come, and the same command goes on where it was stopped.
    """
    from entroprefill_rag.errors import RequestError

    if docs is not None and not docs.is_dir():
        raise RequestError(f"--docs {str(docs)!r} must be a folder that exists")
    if report_only is not None:
        if not report_only.is_dir():
            raise RequestError(f"--report-only {str(report_only)!r} is no folder; give the --out of an earlier run")
        _report(report_only, docs)
        return
    from entroprefill_rag.bench import questions as asked
    from entroprefill_rag.bench.methods import QUICK, catalogue, chosen
    from entroprefill_rag.bench.rows import Store
    from entroprefill_rag.cli.progress import waiting

    names = [name.strip() for name in methods.split(",") if name.strip()] if methods is not None else []
    if quick:
        names, minutes = names or list(QUICK), minutes or QUICK_MINUTES
    # Refused before a model is loaded; the layer is known only after.
    chosen(catalogue(layer=1, budget=budget, cross_encoders=cross_encoder or ()), names)
    if not data and not DATA.is_file():
        raise RequestError(f"no questions: a checkout has {DATA}; elsewhere, name a file of them with --data FILE")
    wanted = asked.in_turn(asked.load(data or [DATA]), questions)
    store = Store(out)
    with waiting("Loading the models"):
        from entroprefill_rag.engine.backend import LocalBackend

        backend = LocalBackend.from_pretrained(model, device=device, dtype=dtype)
    with closing(backend):
        at = _layer(backend, layer)
        selected = chosen(catalogue(layer=at, budget=budget, cross_encoders=cross_encoder or ()), names)
        settings = {"budget": budget, "layer": at, "max_new_tokens": max_new_tokens, "seed": seed}
        done = _run(backend, selected, wanted, store, settings, embedder=embedder, device=device, minutes=minutes)
    if not done:
        note(f"note: the time is over; the same command goes on from here ({out})")
    _report(out, docs)


def _layer(backend: LocalBackend, layer: int | None) -> int:
    from entroprefill_rag.errors import ConfigError

    depth = len(backend.anatomy.layers)
    if backend.anatomy.why_not is not None:
        raise ConfigError(backend.anatomy.why_not.message)
    at = round(0.6 * depth) if layer is None else layer
    if not 1 <= at <= depth - 2:
        raise ConfigError(f"--layer {at} is not among those that can be monitored: 1..{depth - 2} of {depth}")
    return at


def _run(
    backend: LocalBackend,
    methods: list[Method],
    questions: list[Question],
    store: Any,
    settings: dict[str, Any],
    *,
    embedder: str | None,
    device: str | None,
    minutes: float | None,
) -> bool:
    """Do what is left; whether all was done."""
    from entroprefill_rag.bench.compressor import Compressor
    from entroprefill_rag.bench.runner import PEAK_LEFT_OUT, Runner
    from entroprefill_rag.bench.session import Session, stamp_of

    rankers, names = _rankers(methods, settings["seed"], embedder, device)
    budget = float(settings["budget"])
    methods, not_run, compressor = _compressor(methods, lambda: Compressor(backend.model, backend.tokenizer, budget))
    stamp = stamp_of(backend, **settings, **names)
    runner = Runner(
        backend,
        rankers,
        compressor=compressor,
        budget=budget,
        max_new_tokens=int(settings["max_new_tokens"]),
        seed=int(settings["seed"]),
    )
    told: dict[str, Any] = {
        "command": shlex.join(["entroprefill", *sys.argv[1:]]),
        "stamp": stamp,
        "methods": _told_before(store, stamp)
        | {m.name: {"what": m.what, "origin": m.origin, "settings": m.digest} for m in methods},
        "not_run": not_run,
        "notes": [] if backend.model.device.type == "cuda" else [PEAK_LEFT_OUT],
        "complete": False,
    }
    store.save_run(told)
    _warm_up(runner, questions[0], rankers)
    session = Session(runner, methods, store, stamp, seed=int(settings["seed"]), minutes=minutes)
    with _counting() as progress:
        done = session.go(questions, progress)
    store.save_run({**told, "complete": done})
    return done


def _told_before(store: Any, stamp: dict[str, Any]) -> dict[str, Any]:
    """The methods that an earlier run with the same stamp had: their rows are still there."""
    from entroprefill_rag.errors import RecordError

    try:
        run = store.run()
    except RecordError:
        return {}
    return dict(run.get("methods", {})) if run.get("stamp") == stamp else {}


def _rankers(
    methods: list[Method], seed: int, embedder: str | None, device: str | None
) -> tuple[dict[str, Ranker], dict[str, str]]:
    """What the methods rank with, loaded; and what of it belongs into the stamp."""
    from entroprefill_rag.bench.rankers import AtRandom, ByCrossEncoder, BySimilarity, InOrder

    made: dict[str, Ranker] = {}
    names: dict[str, str] = {}
    for name in sorted({method.ranker for method in methods} - {""}):
        if name == "random":
            made[name] = AtRandom(seed)
        elif name == "first":
            made[name] = InOrder()
        elif name == "embedder":
            from entroprefill_rag.retrieval import SentenceEmbedder

            loaded = SentenceEmbedder(embedder, device=device)
            made[name], names["embedder"] = BySimilarity(loaded), loaded.name
        else:
            made[name] = ByCrossEncoder(name, device=device)
    return made, names


def _compressor(
    methods: list[Method], make: Callable[[], Any]
) -> tuple[list[Method], list[dict[str, str]], Callable[[], Any] | None]:
    """The methods that can be run, those that cannot and why, and the compressor."""
    from entroprefill_rag.errors import ConfigError

    if all(method.kind != "compressed" for method in methods):
        return methods, [], None
    try:
        made = make()
    except ConfigError as error:
        left = [method for method in methods if method.kind != "compressed"]
        return left, [{"name": m.name, "reason": str(error)} for m in methods if m.kind == "compressed"], None
    return methods, [], lambda: made


def _warm_up(runner: Any, question: Question, rankers: dict[str, Ranker]) -> None:
    """What is loaded or compiled at first use is in nobody's time."""
    from entroprefill_rag.bench.methods import Method

    runner.run(Method("warm-up", "", "", "oracle" if question.gold else "none"), question)
    for ranker in rankers.values():
        ranker.scores(question)


@contextmanager
def _counting() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; a line for every tenth part where there is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from entroprefill_rag.report.plain import one_line

    err = console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        task = bars.add_task("Answering", total=None)

        def told(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total, description=one_line(what, 60))
            if not err.is_terminal and done % max(1, total // 10) == 0:
                note(f"answers: {done} of {total}")

        yield told


def _report(folder: Path, docs: Path | None) -> None:
    from entroprefill_rag.bench.report import write
    from entroprefill_rag.bench.rows import Store

    for path in write(Store(folder), docs):
        note(f"Written: {path}")
