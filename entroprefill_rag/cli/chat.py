"""``entroprefill chat``: a conversation over a folder of documents, in a terminal or a pipe."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from entroprefill_rag.cli import options as given
from entroprefill_rag.cli.console import explainer, guarded, note

if TYPE_CHECKING:
    from entroprefill_rag.retrieval import FolderIndex

EXAMPLES = """Examples

entroprefill chat --docs contracts/

printf 'When does the warranty end?\\n/audit\\n' | entroprefill chat --docs contracts/
"""


@guarded
def chat(
    docs: given.Docs = None,
    top_k: given.TopK = 20,
    embedder: given.EmbedderName = None,
    no_cache: given.NoCache = False,
    model: given.Model = None,
    no_prune: given.NoPrune = False,
    config: given.Config = None,
    max_new_tokens: given.MaxNewTokens = 256,
    history: given.History = 3,
    seed: given.Seed = None,
    ledger: given.Ledger = None,
    device: given.Device = None,
    dtype: given.DType = None,
    verbose: given.Verbose = False,
) -> None:
    """Talk to a folder of documents: answers with their sources, and commands such as /audit and /full.

    In a pipe each line is a question or a command, and the exit code is 1 where one of them failed.
    """
    from entroprefill_rag.cli import inputs
    from entroprefill_rag.cli.progress import waiting
    from entroprefill_rag.errors import RequestError

    if docs is None:
        raise RequestError("no documents; write: entroprefill chat --docs PATH (a folder, or one document)")
    settings = inputs.load_config(config, enabled=not no_prune, seed=seed)
    noted = inputs.open_ledger(ledger)
    with waiting("Starting"):
        from entroprefill_rag.engine.sources import resolve_model

        model = resolve_model(model)  # before documents are read: what is missing should be said at once
    index = _index(docs, embedder, device, cache=not no_cache)
    with waiting("Loading the model"):
        from entroprefill_rag.chat.loop import converse
        from entroprefill_rag.chat.screen import Screen
        from entroprefill_rag.chat.session import ChatSession
        from entroprefill_rag.engine.backend import LocalBackend

        backend = LocalBackend.from_pretrained(model, device=device, dtype=dtype, ledger=noted)

    explain = explainer(verbose=verbose)
    with noted or nullcontext(), closing(backend):
        screen = Screen()
        session = ChatSession(backend, index, settings, top_k, max_new_tokens, history)
        _welcome(index, backend.name)
        well = converse(session, screen, explain)
    if not well and not screen.interactive:
        raise typer.Exit(1)


def _index(docs: Path, embedder: str | None, device: str | None, *, cache: bool) -> FolderIndex:
    from entroprefill_rag.cli.progress import index_progress
    from entroprefill_rag.retrieval import FolderIndex, SentenceEmbedder

    with index_progress() as told:
        model = SentenceEmbedder(embedder, device=device)
        return FolderIndex.open(docs, model, cache=cache, progress=told)


def _welcome(index: FolderIndex, model: str) -> None:
    """What the answers will come from, on stderr."""
    from entroprefill_rag.report.terminal import counted

    read, skipped = index.reading.documents, index.reading.skipped
    left = f"; {len(skipped)} not read (/docs says why)" if skipped else ""
    store = f"{counted(len(read), 'document')}, {counted(len(index.chunks), 'chunk')}{left}"
    for text in index.notes:
        note(f"note: {text}")
    note(f"{model} over {store}. /help lists the commands.")
