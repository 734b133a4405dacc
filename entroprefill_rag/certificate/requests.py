"""The file of held-out requests: JSON lines, with or without gold chunks. No message quotes what a line says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from entroprefill_rag.errors import CertificateError
from entroprefill_rag.request import RagRequest

NEEDS = ("all", "any", "part", "none")
_LABELLED = ("question", "chunks")
_SHOWN = ("id", "text", "title", "metadata", "protected")


@dataclass(frozen=True)
class HeldOut:
    """One request of the workload.

    Attributes:
        request: what is asked, of which chunks.
        gold: ids of the chunks that hold the answer; None where the line has no label.
        any_is_enough: one gold chunk is enough.
        line: of the file, counted from 1.
    """

    request: RagRequest
    gold: tuple[str, ...] | None = None
    any_is_enough: bool = False
    line: int = 0


def read_requests(path: Path) -> tuple[HeldOut, ...]:
    """The requests of a file, in its order.

    A line is a RagRequest as ``--save-request`` writes it, with ``gold`` (a list of chunk ids) and ``gold_need`` where
    it is labelled; or a labelled question with ``question``, ``chunks``, ``gold_chunk_ids`` and ``meta.gold_need``, as
    in ``benchmarks/data/smoke.jsonl``.

    Raises:
        CertificateError: a line is neither; or the file holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise CertificateError(f"{str(path)!r} is not UTF-8 text; it must hold one request in JSON a line") from None
    found = tuple(_read(line, number, path) for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise CertificateError(f"{str(path)!r} holds no request; it must hold one in JSON a line")
    return found


def digest(requests: Sequence[HeldOut]) -> str:
    """SHA-256 of the requests and their labels, in their order."""
    made = hashlib.sha256()
    for one in requests:
        said = [one.request.model_dump(mode="json"), one.gold, one.any_is_enough]
        made.update(json.dumps(said, sort_keys=True).encode() + b"\n")
    return made.hexdigest()


def _read(text: str, number: int, path: Path) -> HeldOut:
    def refuse(what: str) -> NoReturn:
        raise CertificateError(f"line {number} of {str(path)!r} {what}") from None

    try:
        data: Any = json.loads(text)
    except ValueError as error:
        at = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        refuse(f"is not JSON{at}; each line must be one request, as `entroprefill ask --save-request` writes it")
    if not isinstance(data, dict):
        refuse(f"is {_kind(data)}, not an object; each line must be one request")
    labelled = "question" in data and "query" not in data
    try:
        asked = _from_question(data) if labelled else {k: v for k, v in data.items() if k not in ("gold", "gold_need")}
        request = RagRequest.model_validate(asked)
    except ValidationError as error:
        # The messages of our own checks name chunk ids, which may be file names: only the parser's own are repeated.
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        why = "breaks a rule of requests (a question, chunk ids that differ)"
        refuse(f"is no request: {place}: {why if first['type'] == 'value_error' else first['msg']}")
    gold, need = _labels(data, refuse) if not labelled else _question_labels(data, refuse)
    if gold is not None:
        missing = len(set(gold) - {chunk.id for chunk in request.chunks})
        if missing:
            refuse(f"names {missing} gold chunks that it does not hold; gold must be ids of its own chunks")
    return HeldOut(request, None if gold is None else tuple(dict.fromkeys(gold)), need == "any", number)


def _from_question(data: dict[str, Any]) -> dict[str, Any]:
    """A labelled question as a request; other fields of its chunks are labels, and are left out."""
    chunks = data.get("chunks")
    if isinstance(chunks, list):
        chunks = [
            {name: value for name, value in one.items() if name in _SHOWN and value is not None}
            if isinstance(one, dict)
            else one
            for one in chunks
        ]
    made = {"query": data["question"], "chunks": chunks, "instruction": data.get("instruction") or ""}
    return made if chunks is not None else {"query": data["question"]}


def _labels(data: dict[str, Any], refuse: Any) -> tuple[list[str] | None, str]:
    return _checked(data.get("gold"), data.get("gold_need"), "gold", refuse)


def _question_labels(data: dict[str, Any], refuse: Any) -> tuple[list[str] | None, str]:
    meta = data.get("meta")
    need = meta.get("gold_need") if isinstance(meta, dict) else None
    return _checked(data.get("gold_chunk_ids"), need, "gold_chunk_ids", refuse)


def _checked(gold: Any, need: Any, name: str, refuse: Any) -> tuple[list[str] | None, str]:
    if gold is not None and not (isinstance(gold, list) and all(isinstance(one, str) for one in gold)):
        refuse(f"has {_kind(gold)} as {name}; it must be a list of chunk ids")
    if need is not None and need not in NEEDS:
        refuse(f"has a gold_need that is not known; it must be one of {', '.join(NEEDS)}")
    return gold, need or "all"


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
