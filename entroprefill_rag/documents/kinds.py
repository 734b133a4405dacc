"""Which files are read, and as what. Everything else is skipped: a whitelist, so that surprises stay out."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

Kind = Literal["markdown", "rst", "html", "pdf", "docx", "csv", "text", "code"]

_SUFFIXES: dict[Kind, str] = {
    "markdown": ".md .markdown .mdx",
    "rst": ".rst",
    "html": ".html .htm .xhtml",
    "pdf": ".pdf",
    "docx": ".docx",
    "csv": ".csv .tsv",
    "text": ".txt .text .log .json .jsonl .ndjson .yaml .yml .toml .ini .cfg .conf .xml .tex .adoc .org .srt .vtt",
    "code": ".py .pyi .js .ts .jsx .tsx .java .kt .scala .c .h .cc .cpp .hpp .cs .go .rs .rb .php .swift .lua .jl .r "
    ".pl .sh .bash .sql .css .diff .patch",
}
_KIND_OF: dict[str, Kind] = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
_PLAIN_NAMES = frozenset({"readme", "changelog", "changes", "contributing", "authors", "notice", "todo", "news"})

MAIN_SUFFIXES = ".md .txt .rst .html .pdf .docx .csv .json .log .py"
"""What an error message names as readable."""


def kind_of(path: PurePath) -> Kind | None:
    """The kind a file is read as, by its name; None where it is not read."""
    if not path.suffix and path.name.lower() in _PLAIN_NAMES:
        return "text"
    return _KIND_OF.get(path.suffix.lower())
