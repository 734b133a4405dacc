"""The packaged embedder for LlamaIndex's indexes: no key, no network."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr

if TYPE_CHECKING:
    from entroprefill_rag.retrieval.embedder import SentenceEmbedder

_LOADING = threading.Lock()


class LocalEmbedding(BaseEmbedding):
    """Embeds with a sentence-transformers model on this machine, loaded when the first text comes.

    Raises:
        ModelSourceError: on first use, if there is no such model; the message has the command that installs one.
    """

    model: str | None = Field(
        default=None,
        description="Folder, hub id or packaged model; None takes ENTROPREFILL_EMBEDDER, then the packaged one.",
    )
    device: str | None = Field(default=None, description="Where it runs; None takes an accelerator if there is one.")
    _embedder: Any = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        """Name for serialization."""
        return "EntroPrefillLocalEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return [[float(value) for value in row] for row in self._loaded().documents(texts)] if texts else []

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return [float(value) for value in self._loaded().query(query)]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    def _loaded(self) -> SentenceEmbedder:
        with _LOADING:
            if self._embedder is None:
                from entroprefill_rag.retrieval.embedder import SentenceEmbedder

                self._embedder = SentenceEmbedder(self.model, device=self.device)
        found: SentenceEmbedder = self._embedder
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Weights do not travel; a copy loads its own on first use.
        state = super().__getstate__()
        state["__pydantic_private__"] = {**(state.get("__pydantic_private__") or {}), "_embedder": None}
        return state
