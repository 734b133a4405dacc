"""Which chunks of a folder belong to a question: embeddings of all chunks, kept between calls, and a dot product."""

from entroprefill_rag.retrieval.embedder import Embedder, SentenceEmbedder
from entroprefill_rag.retrieval.index import FolderIndex, Hit

__all__ = ["Embedder", "FolderIndex", "Hit", "SentenceEmbedder"]
