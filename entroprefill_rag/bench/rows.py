"""One line for each question and method: numbers and ids, no text; appended as soon as it is known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from entroprefill_rag.errors import RecordError, RequestError

FORMAT = 1
_BEGINNING = b'{"stamp":'
ROWS, RUN = "rows.jsonl", "run.json"
PARTS = ("select", "layout", "wait", "shallow", "rule", "deep")


class Row(BaseModel):
    """What one method did with one question. None: does not apply, or could not be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stamp: dict[str, Any] = Field(description="What a row must share with others to stand beside them.")
    settings: str = Field(description="Digest of the method's settings.")
    question: str
    set: str
    method: str
    place: int = Field(description="Its turn among the methods of this question, from 0.")
    status: Literal["ok", "failed", "skipped"] = "ok"
    message: str = Field(default="", description="Why it failed or was skipped.")
    answerable: bool = True
    found: bool | None = None
    f1: float | None = None
    declines: bool | None = None
    need_met: bool | None = None
    gold: int = 0
    gold_kept: int | None = None
    chunks: int = 0
    kept: int | None = Field(default=None, description="Chunks that stayed.")
    kept_share: float | None = Field(default=None, description="Of the chunk tokens of the full prompt.")
    same_text: bool | None = None
    same_first: bool | None = None
    kl: float | None = Field(default=None, description="KL(full || this), first token, nats.")
    seconds: dict[str, float] = Field(default_factory=dict, description="Parts of the time to the first token.")
    ttft: float | None = None
    total: float | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    token_layers: int | None = Field(default=None, description="Prompt tokens times layers that they ran through.")
    kv_bytes: int | None = Field(default=None, description="Of the cache after the prefill.")
    peak_bytes: int | None = Field(default=None, description="Largest allocation on the accelerator.")
    outcome: str | None = None
    layer: int | None = None
    reason: str | None = None
    verdicts: dict[str, int] = Field(default_factory=dict, description="Of the layers looked at.")

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a rerun finds it by."""
        return self.set, self.question, self.method, self.settings


class Store:
    """The folder of a run.

    Args:
        folder: made where there is none.

    Raises:
        RequestError: it cannot be made, or is a file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"--out {str(folder)!r} cannot be made a folder: {error.strerror}") from error

    def rows(self, stamp: dict[str, Any] | None = None) -> list[Row]:
        """The rows with this stamp, each question and method once; without one, with the stamp of the last row.

        A last line that was cut off in the middle of writing is left out.

        Raises:
            RecordError: another line that is no row.
        """
        file = self.folder / ROWS
        whole, rest = _lines(file)
        found: list[Row] = []
        for number, line in enumerate(whole, start=1):
            try:
                found.append(Row.model_validate_json(line))
            except ValidationError as error:
                raise RecordError(f"line {number} of {str(file)!r} is no row of a benchmark; take it out") from error
        if rest and not (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest)):
            raise RecordError(f"the last line of {str(file)!r} is not the beginning of a row; take it out")
        if not found:
            return []
        wanted = found[-1].stamp if stamp is None else stamp
        return list({row.key: row for row in found if row.stamp == wanted}.values())

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows, each on a line of its own; what was cut off before them goes, since nobody counts it."""
        file = self.folder / ROWS
        text = "".join(row.model_dump_json() + "\n" for row in rows)
        whole, rest = _lines(file)
        if rest:
            file.write_bytes(b"".join(line + b"\n" for line in whole))
        with file.open("ab") as out:
            out.write(text.encode())

    def save_run(self, told: dict[str, Any]) -> None:
        """What the rows do not say: the command, what was not run and why."""
        (self.folder / RUN).write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def run(self) -> dict[str, Any]:
        """See :meth:`save_run`.

        Raises:
            RecordError: there is none.
        """
        file = self.folder / RUN
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RecordError(
                f"no benchmark's {RUN} in {str(self.folder)!r}; give the folder that `entroprefill bench --out` wrote"
            ) from error
        if not isinstance(told, dict):
            raise RecordError(f"{str(file)!r} is not what `entroprefill bench` wrote")
        return told


def _lines(file: Path) -> tuple[list[bytes], bytes]:
    """The lines that end as such, and what follows the last of them: a row that was not written to its end."""
    *whole, rest = file.read_bytes().split(b"\n") if file.is_file() else [b""]
    return whole, rest
