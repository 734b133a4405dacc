"""The packaged embedder for LangChain's vector stores: no key, no network."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from langchain_core.embeddings import Embeddings

if TYPE_CHECKING:
    from entroprefill_rag.retrieval.embedder import SentenceEmbedder


class LocalEmbeddings(Embeddings):
    """Embeds with a sentence-transformers model on this machine, loaded when the first text comes.

    Args:
        model: a folder, a hub id or a packaged model; None takes ``ENTROPREFILL_EMBEDDER``, then the packaged one.
        device: where it runs; None takes an accelerator if there is one.

    Raises:
        ModelSourceError: on first use, if there is no such model; the message has the command that installs one.
    """

    def __init__(self, model: str | None = None, device: str | None = None) -> None:
        self.model = model
        self.device = device

    @cached_property
    def _embedder(self) -> SentenceEmbedder:
        from entroprefill_rag.retrieval.embedder import SentenceEmbedder

        return SentenceEmbedder(self.model, device=self.device)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector of length 1 per passage."""
        if not texts:
            return []
        return [[float(value) for value in row] for row in self._embedder.documents(texts)]

    def embed_query(self, text: str) -> list[float]:
        """A vector of length 1 for a question."""
        return [float(value) for value in self._embedder.query(text)]
