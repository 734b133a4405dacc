"""The index of a folder: every chunk's vector, made once, searched by a dot product."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.documents import Limits, Reading, read_folder, split
from entroprefill_rag.errors import DocumentError, ModelSourceError, RequestError
from entroprefill_rag.request import Chunk
from entroprefill_rag.retrieval.embedder import Embedder, SentenceEmbedder
from entroprefill_rag.retrieval.store import IndexStore

_SLAB = 1024
_OTHER_MODEL = (
    "the kept vectors are of another embedding model with the same name (the lengths differ); "
    "run: entroprefill cache clear"
)

Progress = Callable[[str, int, int], None]
"""Told the stage (``"reading"`` or ``"embedding"``), how many are done, of how many."""


@dataclass(frozen=True)
class Hit:
    """A chunk and its cosine similarity to the question, in [-1, 1]."""

    chunk: Chunk
    score: float


@dataclass(frozen=True)
class FolderIndex:
    """Chunks of a folder of documents and their vectors.

    Attributes:
        chunks: in the order of the documents' paths.
        vectors: ``[N, d]`` float32, one row of length 1 a chunk.
        embedder: embeds the questions.
        reading: the documents, and what was skipped and why.
        embedded: how many chunks had to be embedded now; the others were kept from before.
        notes: what went wrong with the cache, if anything.
    """

    chunks: list[Chunk] = field(repr=False)
    vectors: NDArray[np.float32] = field(repr=False)
    embedder: Embedder = field(repr=False)
    reading: Reading = field(repr=False)
    embedded: int
    notes: tuple[str, ...] = ()

    @classmethod
    def open(
        cls,
        path: str | Path,
        embedder: Embedder | str | None = None,
        *,
        cache: bool = True,
        progress: Progress | None = None,
        limits: Limits | None = None,
        max_characters: int = 800,
        overlap: int = 0,
    ) -> FolderIndex:
        """Read a folder, split it, and embed what was not embedded before.

        Vectors are kept by the hash of each chunk: after a change only the changed chunks are embedded again.

        Args:
            path: a folder of documents, or one document.
            embedder: an :class:`Embedder`, or what :class:`SentenceEmbedder` takes.
            cache: keep vectors, and texts of formats that are slow to read, in the user's cache folder.
            progress: told how far it is.
            limits: bounds on what is read.
            max_characters: size of a chunk, see :func:`~entroprefill_rag.documents.split`.
            overlap: characters repeated between chunks.

        Raises:
            DocumentError: nothing could be read.
            ModelSourceError: the embedding model cannot be had.
        """
        tell = progress or (lambda stage, done, total: None)
        if embedder is None or isinstance(embedder, str):
            embedder = SentenceEmbedder(embedder)
        settings = f"{max_characters} {overlap}"
        store = IndexStore.of(Path(path), embedder.fingerprint, settings) if cache else IndexStore(None)
        tell("reading", 0, 0)
        reading = read_folder(path, limits, store if cache else None)
        tell("reading", len(reading.documents), len(reading.documents))
        chunks = [chunk for document in reading.documents for chunk in split(document, max_characters, overlap)]
        most = (limits or Limits()).max_chunks
        if len(chunks) > most:
            raise DocumentError(f"{len(chunks)} chunks, more than {most}: give fewer documents, or longer chunks")
        texts = [_embedded_text(chunk) for chunk in chunks]
        hashes = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
        if not chunks:
            raise DocumentError(f"the documents of {str(path)!r} hold nothing but white space")
        about = {"documents": str(Path(path).resolve()), "embedder": embedder.name, "chunks": len(chunks)}
        kept = dict(store.load())
        wanted = dict(zip(hashes, texts, strict=True))
        missing = [name for name in wanted if name not in kept]
        for start in range(0, len(missing), _SLAB):
            slab = missing[start : start + _SLAB]
            made = embedder.documents(
                [wanted[name] for name in slab],
                lambda done, _, start=start: tell("embedding", start + done, len(missing)),  # type: ignore[misc]
            )
            kept.update(zip(slab, made, strict=True))
            if start + _SLAB < len(missing):  # an interrupted first run goes on from here
                store.save(list(kept), _stack(kept.values()), about)
        vectors = _stack([kept[name] for name in hashes])
        if missing or len(kept) > len(wanted):
            store.save(list(wanted), _stack([kept[name] for name in wanted]), about)
        store.forget_unused()
        return cls(chunks, vectors, embedder, reading, len(missing), tuple(dict.fromkeys(store.notes)))

    @classmethod
    def joined(cls, parts: Sequence[FolderIndex]) -> FolderIndex:
        """One index of several folders' chunks; the folders' paths must differ, for chunk ids are made of them.

        Args:
            parts: at least one; all of the same embedder.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        if any(part.vectors.shape[1] != first.vectors.shape[1] for part in parts):
            raise ModelSourceError(_OTHER_MODEL)
        return cls(
            [chunk for part in parts for chunk in part.chunks],
            np.concatenate([part.vectors for part in parts]),
            first.embedder,
            Reading(
                [document for part in parts for document in part.reading.documents],
                [skipped for part in parts for skipped in part.reading.skipped],
            ),
            sum(part.embedded for part in parts),
            tuple(dict.fromkeys(text for part in parts for text in part.notes)),
        )

    def search(self, query: str, top_k: int = 20) -> list[Hit]:
        """The ``top_k`` chunks most similar to a question, best first; equal scores in the documents' order.

        Raises:
            RequestError: an empty question, or ``top_k`` below 1.
        """
        if not query.strip():
            raise RequestError("the question is empty; ask something")
        if any("\ud800" <= mark <= "\udfff" for mark in query):
            raise RequestError("the question holds lone surrogates, which are no text; decode it with errors='replace'")
        if top_k < 1:
            raise RequestError(f"top_k must be at least 1, got {top_k}")
        asked = self.embedder.query(query)
        if asked.shape != self.vectors.shape[1:]:
            raise ModelSourceError(_OTHER_MODEL)
        scores = self.vectors @ asked
        best = np.argsort(-scores, kind="stable")[:top_k]
        return [Hit(self.chunks[position], float(scores[position])) for position in best.tolist()]


def request_chunks(hits: Sequence[Hit]) -> list[Chunk]:
    """The chunks of a search, each with its score in its metadata, ready for a request."""
    return [
        hit.chunk.model_copy(update={"metadata": {**hit.chunk.metadata, "score": round(hit.score, 4)}}) for hit in hits
    ]


def _stack(rows: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    try:
        return np.stack(list(rows))
    except ValueError as error:
        raise ModelSourceError(_OTHER_MODEL) from error


def _embedded_text(chunk: Chunk) -> str:
    return f"{chunk.title}\n{chunk.text}"
