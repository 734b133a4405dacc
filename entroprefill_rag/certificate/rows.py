"""What has been measured, kept in a file as soon as it is there: a run that was stopped goes on where it was.

Numbers and digests only. A row is used again where everything that it depends on is the same: model, profile,
configurations, requests, loss, seed and versions.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from entroprefill_rag.errors import CertificateError

_BEGINNING = '{"stamp":'


class Row(BaseModel):
    """One request under one configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stamp: str
    place: int = Field(ge=0, description="Of the grid.")
    request: int = Field(ge=0, description="Place in the file, counted from 0 among those measured.")
    outcome: str
    loss: float = Field(ge=0.0, le=1.0)
    saved: int = Field(ge=0, description="Tokens x layers not run.")
    full: int = Field(ge=1, description="Tokens x layers of a full prefill.")


def stamp_of(what: dict[str, Any]) -> str:
    """Digest of everything that a row depends on."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


class Rows:
    """The rows of one certificate, by place and request.

    Args:
        stamp: of this certificate's setup; other rows of the file are left alone.
        path: None keeps them in memory.

    Raises:
        CertificateError: a line of the file is no row.
    """

    def __init__(self, stamp: str, path: Path | None = None) -> None:
        self.stamp = stamp
        self._path = path
        self._found: dict[tuple[int, int], Row] = {}
        if path is not None and path.is_file():
            self._load(path)

    def _load(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if number == len(lines) and line.startswith(_BEGINNING):
                break  # not written to its end, or its newline is missing: measured again, for it is cut off below
            try:
                row = Row.model_validate_json(line)
            except ValidationError:
                if number == len(lines) and _BEGINNING.startswith(line):
                    break
                raise CertificateError(
                    f"line {number} of {str(path)!r} is no row of a certificate; --resume must name a file that "
                    "`entroprefill certify --resume` wrote, or a new one"
                ) from None
            if row.stamp == self.stamp:
                self._found[row.place, row.request] = row
        if text and not text.endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")

    def get(self, place: int, request: int) -> Row | None:
        """The row, if it is known."""
        return self._found.get((place, request))

    def add(self, row: Row) -> None:
        """Keep a row."""
        self._found[row.place, row.request] = row
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(row.model_dump_json() + "\n")
