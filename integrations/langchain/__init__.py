"""EntroPrefill in LangChain: a runnable, a document compressor and a chat model that prune in mid-prefill.

>>> from entroprefill_rag.integrations.langchain import EntroPrefillRunnable
>>> chain = {"context": retriever, "input": RunnablePassthrough()} | EntroPrefillRunnable()  # doctest: +SKIP
"""

from __future__ import annotations

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the LangChain adapter needs langchain-core, which is not installed: pip install -e '.[langchain]' in a clone"
    ) from error

from entroprefill_rag.integrations._shared import set_default_backend
from entroprefill_rag.integrations.langchain.audit import get_audit
from entroprefill_rag.integrations.langchain.chat_model import ChatEntroPrefill
from entroprefill_rag.integrations.langchain.compressor import EntroPrefillCompressor
from entroprefill_rag.integrations.langchain.documents import PrunedDocuments
from entroprefill_rag.integrations.langchain.embeddings import LocalEmbeddings
from entroprefill_rag.integrations.langchain.pipeline import backend_from_pipeline
from entroprefill_rag.integrations.langchain.runnable import EntroPrefillRunnable

__all__ = [
    "ChatEntroPrefill",
    "EntroPrefillCompressor",
    "EntroPrefillRunnable",
    "LocalEmbeddings",
    "PrunedDocuments",
    "backend_from_pipeline",
    "get_audit",
    "set_default_backend",
]
