"""Calibration from end to end: texts to questions, questions to measurements, measurements to a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from entroprefill_rag.calibration.fit import fit
from entroprefill_rag.calibration.measure import Measured, measure
from entroprefill_rag.calibration.profile import ModelProfile
from entroprefill_rag.calibration.questions import TrainingQuestion, make_questions, packaged_chunks
from entroprefill_rag.errors import ConfigError, ProfileError, PromptOverflowError
from entroprefill_rag.request import Chunk, RagRequest

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend

QUESTIONS = 60
CHUNKS = 10


def training_questions(
    *, docs: Path | None = None, requests: Path | None = None, count: int = QUESTIONS, seed: int = 0
) -> tuple[tuple[TrainingQuestion, ...], str]:
    """Training questions and where they come from: a folder of documents, requests, or the packaged passages.

    Args:
        docs: a folder, or one document.
        requests: JSON lines, each a RagRequest; their own questions are not used.
        count: questions wanted.
        seed: of all choices.

    Raises:
        ProfileError: both were given, a line is no request, or no question can be made.
        DocumentError: the documents cannot be read.
    """
    if docs is not None and requests is not None:
        raise ProfileError("give documents or requests, not both; without either the packaged passages are used")
    if docs is not None:
        return make_questions([_document_chunks(docs)], count, seed=seed, chunks=CHUNKS), "documents"
    if requests is not None:
        return make_questions(_request_pools(requests), count, seed=seed, chunks=CHUNKS), "requests"
    return make_questions([packaged_chunks()], count, seed=seed, chunks=CHUNKS), "packaged"


def _document_chunks(docs: Path) -> list[Chunk]:
    from entroprefill_rag.documents.folder import read_folder
    from entroprefill_rag.documents.splitting import split

    # Shorter than what is retrieved: more questions fit into the same time.
    return [chunk for document in read_folder(docs).documents for chunk in split(document, 500)]


def _request_pools(path: Path) -> list[tuple[Chunk, ...]]:
    pools = []
    # Not splitlines: JSON may hold U+2028 and the like as they are.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            pools.append(RagRequest.model_validate_json(line).chunks)
        except ValueError:
            # Without the parser's own words: they quote the text.
            raise ProfileError(
                f"line {number} of {str(path)!r} is no request; each line must be one, as `entroprefill ask "
                "--save-request` writes it"
            ) from None
    return pools


def calibrate(
    backend: LocalBackend,
    questions: Sequence[TrainingQuestion],
    *,
    source: str = "packaged",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ModelProfile:
    """Measure a model on training questions and fit its profile.

    Args:
        backend: the model.
        questions: from :func:`training_questions`.
        source: where they come from; goes into the profile.
        seed: of folds and bootstrap.
        progress: called with questions done and questions in all.

    Raises:
        ConfigError: the model's attention cannot be read.
        ProfileError: too few questions fit the model, or no layer is better than chance.
    """
    from entroprefill_rag.engine.recording import versions

    if backend.anatomy.why_not is not None:
        raise ConfigError(backend.anatomy.why_not.message)
    found: list[tuple[Measured, TrainingQuestion]] = []
    for done, question in enumerate(questions):
        if progress is not None:
            progress(done, len(questions))
        try:
            found.append((measure(backend, question.request, question.gold), question))
        except PromptOverflowError:
            continue  # counted by the profile: fewer questions than were made
    if progress is not None:
        progress(len(questions), len(questions))
    return fit(
        [one for one, _ in found],
        [question.form for _, question in found],
        [question.group for _, question in found],
        backend.model_info,
        source=source,
        seed=seed,
        versions=versions(),
    )
