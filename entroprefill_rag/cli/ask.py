"""``entroprefill ask``: from a question and a folder to an answer, its sources and its audit."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.console import console, guarded

if TYPE_CHECKING:
    from collections.abc import Generator

    from entroprefill_rag.config import PruningConfig
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.record import GenerationResult
    from entroprefill_rag.request import RagRequest

EXAMPLES = """Examples

entroprefill ask "When does the warranty end?" --docs contracts/

entroprefill ask "Which ports are open?" --docs notes.md --top-k 8 --show-dropped

entroprefill ask "Why did it fail?" --docs logs/ --json | jq .retained_ids

entroprefill ask "Why?" --docs d/ --record a.json && entroprefill show a.json
"""


@guarded
def ask(
    question: given.Question = None,
    docs: given.Docs = None,
    request: given.Request = None,
    top_k: given.TopK = 20,
    embedder: given.EmbedderName = None,
    no_cache: given.NoCache = False,
    model: given.Model = None,
    no_prune: given.NoPrune = False,
    config: given.Config = None,
    max_new_tokens: given.MaxNewTokens = 256,
    seed: given.Seed = None,
    ledger: given.Ledger = None,
    device: given.Device = None,
    dtype: given.DType = None,
    as_json: given.AsJson = False,
    show_dropped: given.ShowDropped = False,
    record: given.Record = None,
    save_request: given.SaveRequest = None,
    verbose: given.Verbose = False,
) -> None:
    """Ask a folder of documents. The answer is streamed; then come its sources and the audit."""
    from entroprefill_rag.cli import inputs
    from entroprefill_rag.cli.progress import waiting

    asked_for = inputs.what_is_asked(question, docs, request)
    inputs.check_outputs({"--record": record, "--save-request": save_request})
    settings = inputs.load_config(config, enabled=not no_prune, seed=seed)
    noted = inputs.open_ledger(ledger)
    with waiting("Starting"):
        from entroprefill_rag.engine.sources import resolve_model

        model = resolve_model(model)  # before documents are read: what is missing should be said at once
    if isinstance(asked_for, Path):
        asked = inputs.load_request(asked_for)
    else:
        asked = inputs.retrieve(
            *asked_for, embedder=embedder, top_k=top_k, device=device, cache=not no_cache, verbose=verbose
        )
    if save_request is not None:
        save_request.write_text(asked.model_dump_json(indent=1), encoding="utf-8")
    with waiting("Loading the model"):
        from entroprefill_rag.engine.backend import LocalBackend

        backend = LocalBackend.from_pretrained(model, device=device, dtype=dtype, ledger=noted)
    with noted or nullcontext(), closing(backend):
        result = _answer(backend, asked, settings, max_new_tokens, silent=as_json)
    if record is not None:
        record.write_text(result.audit.to_json(indent=1), encoding="utf-8")
    if as_json:
        # Pure ASCII: control characters of the answer cannot reach the terminal, and any encoding can write it.
        typer.echo(json.dumps(as_data(result, asked)))
    else:
        _report(result, asked, show_dropped=show_dropped)


def as_data(result: GenerationResult, request: RagRequest) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    from entroprefill_rag.report.sources import sources_of

    record = result.audit
    data = result.model_dump(mode="json")
    return {
        **{name: data[name] for name in ("answer", "retained_ids", "dropped_ids", "protected_ids", "finish_reason")},
        "outcome": record.outcome,
        "reason": record.reason.model_dump(mode="json"),
        "model": record.model.model_dump(mode="json"),
        "usage": data["usage"],
        "timings": data["timings"],
        "sources": [asdict(source) for source in sources_of(record, request.chunks)],
        "audit": data["audit"],
    }


def _answer(
    backend: LocalBackend, request: RagRequest, config: PruningConfig, max_new_tokens: int, *, silent: bool
) -> GenerationResult:
    """Stream the answer to stdout."""
    from entroprefill_rag.cli.progress import waiting
    from entroprefill_rag.report.streamed import write_answer

    # Greedy: the same question to the same documents gets the same answer.
    stream = backend.stream(request, config, max_new_tokens=max_new_tokens, do_sample=False)
    with closing(cast("Generator[object, None, None]", stream)), waiting("Reading the prompt") as stop_waiting:
        return write_answer(stream, None if silent else console().file, stop_waiting)


def _report(result: GenerationResult, request: RagRequest, *, show_dropped: bool) -> None:
    from entroprefill_rag.report.sources import sources_of
    from entroprefill_rag.report.terminal import audit_panel, dropped_texts, sources_table, warnings_text

    out = console()
    out.print(sources_table(sources_of(result.audit, request.chunks)))
    if show_dropped:
        out.print(dropped_texts(result.audit, request.chunks))
    out.print(audit_panel(result.audit, result.usage, result.timings))
    if (warnings := warnings_text(result.audit)) is not None:
        out.print(warnings)
