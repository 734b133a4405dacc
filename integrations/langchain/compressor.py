"""EntroPrefillCompressor: keeps the retrieved documents that a local model's attention needs, for any other model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.callbacks import Callbacks, adispatch_custom_event, dispatch_custom_event
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.config import ensure_config, get_async_callback_manager_for_config
from pydantic import ConfigDict, Field

from entroprefill_rag.errors import RequestError
from entroprefill_rag.integrations._shared import summary
from entroprefill_rag.integrations.langchain.documents import PrunedDocuments, Retrieved
from entroprefill_rag.integrations.langchain.messages import question
from entroprefill_rag.integrations.langchain.settings import PruningSettings
from entroprefill_rag.record import AuditRecord, PruneResult
from entroprefill_rag.request import RagRequest

EVENT = "entroprefill_audit"
_FULL_RECORD = "get_audit(documents) gives the full record, on the list that compress_documents returned"


class EntroPrefillCompressor(PruningSettings, BaseDocumentCompressor):
    """Filters documents: the local model reads them up to the layer that decides, and stops there.

    The retained documents go on to another model, which reads them as a shortened prompt of its own; the record's
    guarantees are about the local model's attention and do not extend to that other model. The record is in
    ``get_audit(documents)``, and its summary in a custom event ``"entroprefill_audit"`` where a run can take it.

    Example:
        >>> ContextualCompressionRetriever(  # doctest: +SKIP
        ...     base_compressor=EntroPrefillCompressor(), base_retriever=retriever
        ... )
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    instruction: str = Field(default="", description="Protected text before everything else; empty: a default.")
    add_relevance_score: bool = Field(
        default=False, description="Put the chunk's score into metadata['relevance_score'], where there is one."
    )

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> PrunedDocuments:
        """The retained documents, in their original order; all of them where pruning was bypassed.

        Raises:
            RequestError: the question is None or blank, or an item is no document.
        """
        retrieved, request = self._request(documents, query)
        if not retrieved.documents:
            return PrunedDocuments()
        outcome = self._styled().prune(request, self.pruning)
        if (event := _event_config(callbacks)) is not None:
            dispatch_custom_event(EVENT, _summary(retrieved, outcome), config=event)
        return self._kept(retrieved, outcome)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> PrunedDocuments:
        """:meth:`compress_documents`; the event loop stays free."""
        retrieved, request = self._request(documents, query)
        if not retrieved.documents:
            return PrunedDocuments()
        if not self.source.loaded:
            await asyncio.to_thread(self.source.get)
        outcome = await self._styled().aprune(request, self.pruning)
        if (event := _event_config(callbacks)) is not None:
            await adispatch_custom_event(EVENT, _summary(retrieved, outcome), config=event)
        return self._kept(retrieved, outcome)

    def as_runnable(self) -> Runnable[dict[str, Any], PrunedDocuments]:
        """For LCEL: ``{"input" | "question" | "query", "context" | "documents"}`` to the retained documents.

        Example:
            >>> RunnablePassthrough.assign(context=EntroPrefillCompressor().as_runnable())  # doctest: +SKIP
        """

        def compress(given: dict[str, Any], config: RunnableConfig) -> PrunedDocuments:
            documents, query = _parts(given)
            return self.compress_documents(documents, query, config.get("callbacks"))

        async def acompress(given: dict[str, Any], config: RunnableConfig) -> PrunedDocuments:
            documents, query = _parts(given)
            return await self.acompress_documents(documents, query, config.get("callbacks"))

        return RunnableLambda(compress, acompress, name=type(self).__name__)

    def _request(self, documents: Any, query: Any) -> tuple[Retrieved, RagRequest]:
        asked = question(query)
        retrieved = Retrieved.of(documents)
        chunks = retrieved.chunks(self.title_key)
        return retrieved, RagRequest(instruction=self.instruction, chunks=chunks, query=asked)

    def _kept(self, retrieved: Retrieved, outcome: PruneResult) -> PrunedDocuments:
        scores = _scores(outcome.audit) if self.add_relevance_score else None
        # What did not fit the local model was not judged; the other model may still read it.
        kept = (*outcome.retained_ids, *outcome.audit.prompt.not_admitted)
        return PrunedDocuments(
            retrieved.retained(kept, scores), audit=outcome.audit, dropped=retrieved.places(outcome.dropped_ids)
        )


def _summary(retrieved: Retrieved, outcome: PruneResult) -> dict[str, Any]:
    return summary(
        outcome.audit,
        mode="filter",
        timings=outcome.timings,
        full_record=_FULL_RECORD,
        stand_ins=retrieved.ids.report(),
    )


def _scores(record: AuditRecord) -> dict[str, float]:
    """Scores of the deciding layer per chunk id; higher is more useful."""
    trial = record.trial
    if trial is None or not trial.scores:
        return {}
    return {chunk.id: float(score) for chunk, score in zip(record.prompt.chunks, trial.scores, strict=True)}


def _event_config(callbacks: Callbacks | None) -> RunnableConfig | None:
    """Where an event would go: None without a run to attach it to, where dispatching would raise."""
    config = ensure_config({"callbacks": callbacks} if callbacks is not None else None)
    manager = get_async_callback_manager_for_config(config)
    return config if manager.parent_run_id is not None else None


def _parts(given: Any) -> tuple[Any, Any]:
    if not isinstance(given, Mapping):
        raise RequestError(f"the input is a {type(given).__name__}; pass {{'input': question, 'context': documents}}")
    documents = next((given[name] for name in ("context", "documents") if given.get(name) is not None), None)
    if documents is None:
        raise RequestError(f"the input has no documents (it has {sorted(map(str, given))}); pass them as 'context'")
    query = next((given[name] for name in ("input", "question", "query") if given.get(name) is not None), None)
    return documents, query
