"""LangChain documents as chunks and back: ids, metadata and type stay, and inputs are never touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document

from entroprefill_rag.errors import RequestError
from entroprefill_rag.integrations._shared import Ids, unique_ids
from entroprefill_rag.record import AuditRecord
from entroprefill_rag.request import Chunk

RELEVANCE = "relevance_score"


class PrunedDocuments(list[Document]):
    """Retained documents, as a list that also has the record of what happened to the others.

    Attributes:
        audit: the full record; None where there was nothing to look at.
        dropped: id and position of each document that was removed.
    """

    def __init__(
        self,
        documents: Iterable[Document] = (),
        audit: AuditRecord | None = None,
        dropped: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(documents)
        self.audit = audit
        self.dropped = [dict(each) for each in dropped]


@dataclass(frozen=True)
class Retrieved:
    """Documents of one request with the ids they go by.

    Attributes:
        documents: the caller's own objects, in order.
        ids: per document, the id of its chunk.
    """

    documents: tuple[Document, ...]
    ids: Ids

    @classmethod
    def of(cls, documents: Any) -> Retrieved:
        """Check what a caller gave as documents.

        Raises:
            RequestError: it is no sequence of documents.
        """
        if isinstance(documents, (str, bytes, Document, Mapping)) or not isinstance(documents, Iterable):
            raise RequestError(
                f"documents must be a list of langchain_core Documents, got {type(documents).__name__}; wrap texts as "
                "[Document(page_content=text)]"
            )
        found = tuple(documents)
        for position, document in enumerate(found):
            if not isinstance(document, Document):
                raise RequestError(
                    f"documents must be langchain_core Documents, but item {position} is a {type(document).__name__}; "
                    "wrap texts as Document(page_content=text)"
                )
        return cls(found, unique_ids([each.id for each in found], [each.page_content for each in found]))

    def chunks(self, title_key: str | None) -> tuple[Chunk, ...]:
        """As chunks: the text is ``page_content`` and nothing else; a title only from the metadata key asked for."""
        return tuple(
            Chunk(id=chunk_id, text=document.page_content, title=_title(document, title_key))
            for chunk_id, document in zip(self.ids.ids, self.documents, strict=True)
        )

    def retained(self, kept: Iterable[str], scores: Mapping[str, float] | None = None) -> list[Document]:
        """Copies of the documents whose chunks were kept, in their original order.

        Args:
            kept: ids of the retained chunks.
            scores: per id, a number to put into the metadata as ``relevance_score``; None puts nothing.
        """
        wanted = frozenset(kept)
        return [
            document.model_copy(update={"metadata": {**document.metadata, **_relevance(chunk_id, scores)}})
            for chunk_id, document in zip(self.ids.ids, self.documents, strict=True)
            if chunk_id in wanted
        ]

    def places(self, ids: Iterable[str]) -> list[dict[str, Any]]:
        """Id and position of each of ``ids``, in original order."""
        wanted = frozenset(ids)
        return [{"id": each, "position": at} for at, each in enumerate(self.ids.ids) if each in wanted]


def _title(document: Document, title_key: str | None) -> str:
    value = document.metadata.get(title_key) if title_key is not None else None
    return "" if value is None else str(value)


def _relevance(chunk_id: str, scores: Mapping[str, float] | None) -> dict[str, float]:
    return {} if scores is None or chunk_id not in scores else {RELEVANCE: float(scores[chunk_id])}
