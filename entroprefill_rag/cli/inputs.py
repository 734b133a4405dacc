"""What ``ask`` is given: options checked before anything slow begins, files read, the request made."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from entroprefill_rag.cli.console import note
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import ConfigError, RecordError, RequestError
from entroprefill_rag.request import RagRequest

if TYPE_CHECKING:
    from entroprefill_rag.ledger import ReuseLedger
    from entroprefill_rag.record import AuditRecord
    from entroprefill_rag.retrieval import FolderIndex

_LISTED = 5


def what_is_asked(question: str | None, docs: Path | None, request: Path | None) -> tuple[str, Path] | Path:
    """A question and its documents, or the file of a saved request.

    Raises:
        RequestError: neither, or both.
    """
    if request is not None:
        if question is not None or docs is not None:
            raise RequestError("--request already holds the question and its chunks; leave QUESTION and --docs out")
        return request
    if question is None:
        raise RequestError('no question; write: entroprefill ask "QUESTION" --docs PATH (or --request FILE)')
    if not question.strip():
        raise RequestError("the question is empty; ask something")
    if docs is None:
        raise RequestError("no documents; give a folder or a file with --docs PATH (or --request FILE)")
    # Bytes of the command line that are not UTF-8 arrive as lone surrogates, which no tokenizer takes.
    return question.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), docs


def check_outputs(outputs: dict[str, Path | None]) -> None:
    """Refuse, before anything slow begins, files that cannot be written.

    Raises:
        RequestError: such a file.
    """
    for option, path in outputs.items():
        if path is None:
            continue
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise RequestError(f"{option} {str(path)!r} cannot be written: it must name a file in a folder that exists")
        try:
            if path.exists():
                with path.open("ab"):
                    continue
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                continue
        except OSError as error:
            raise RequestError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error


def load_config(path: Path | None, *, enabled: bool, seed: int | None) -> PruningConfig:
    """The configuration of a file, or the default, with what the command line says on top.

    Raises:
        pydantic.ValidationError: the file is no PruningConfig.
    """
    config = PruningConfig() if path is None else PruningConfig.model_validate_json(path.read_bytes())
    if callable(config.head_weights):
        raise ConfigError("head_weights of a file must be a name; a callable can be given in Python only")
    if not enabled:
        config = config.model_copy(update={"enabled": False})
    if seed is not None:
        config = config.model_copy(update={"audit": config.audit.model_copy(update={"seed": seed})})
    return config


def open_ledger(path: Path | None) -> ReuseLedger | None:
    """The ledger of a file, made where there is none; None where no file is named.

    Raises:
        LedgerError: the file is no ledger, cannot be written, or comes from a newer version.
    """
    from entroprefill_rag.ledger import ReuseLedger

    return None if path is None else ReuseLedger.open(path)


def load_record(path: Path) -> AuditRecord:
    """A record from a file that ``--record`` wrote.

    Raises:
        RecordError: the file is no record; says so where it is a request.
    """
    from entroprefill_rag.record import AuditRecord

    text = path.read_bytes()
    try:
        return AuditRecord.from_json(text)
    except RecordError as error:
        try:
            RagRequest.model_validate_json(text)
        except ValueError:
            raise error from None
        raise RecordError(
            f"{str(path)!r} is a request, not a record: it holds a question and its chunks. Records come from "
            "`entroprefill ask --record FILE`; a request goes with one as --request"
        ) from None


def load_request(path: Path) -> RagRequest:
    """A request from a file that ``--save-request`` wrote, or somebody by hand.

    Raises:
        pydantic.ValidationError: the file is no RagRequest.
    """
    return RagRequest.model_validate_json(path.read_bytes())


def retrieve(
    question: str, docs: Path, *, embedder: str | None, top_k: int, device: str | None, cache: bool, verbose: bool
) -> RagRequest:
    """The request for a question to a folder: its index, opened or made, and the best chunks."""
    from entroprefill_rag.cli.progress import index_progress
    from entroprefill_rag.retrieval import FolderIndex, SentenceEmbedder
    from entroprefill_rag.retrieval.index import request_chunks

    with index_progress() as told:
        model = SentenceEmbedder(embedder, device=device)
        index = FolderIndex.open(docs, model, cache=cache, progress=told)
        told("searching", 0, 0)
        chunks = request_chunks(index.search(question, top_k))
    _tell_what_was_left_out(index, verbose=verbose)
    return RagRequest(chunks=tuple(chunks), query=question)


def _tell_what_was_left_out(index: FolderIndex, *, verbose: bool) -> None:
    lines = [f"{one.path}: {one.reason}" for one in index.reading.skipped if verbose or one.reason != "hidden"]
    lines += [f"{document.path}: {text}" for document in index.reading.documents for text in document.notes]
    for line in lines if verbose else lines[:_LISTED]:
        note(f"note: {line}")
    if len(lines) > _LISTED and not verbose:
        note(f"note: {len(lines) - _LISTED} more of this kind (--verbose lists them)")
    for text in index.notes:
        note(f"note: {text}")
