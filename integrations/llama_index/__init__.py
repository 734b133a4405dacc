"""EntroPrefill in LlamaIndex: prune retrieved nodes in mid-prefill, answer from the same prefill, keep the record.

>>> from entroprefill_rag.integrations.llama_index import EntroPrefillPostprocessor
>>> pp = EntroPrefillPostprocessor()
>>> engine = index.as_query_engine(  # doctest: +SKIP
...     node_postprocessors=[pp], response_synthesizer=pp.synthesizer()
... )
"""

from __future__ import annotations

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the LlamaIndex adapter needs llama-index-core, which is not installed: "
        "pip install -e '.[llama-index]' in a clone"
    ) from error

from entroprefill_rag.integrations._shared import set_default_backend
from entroprefill_rag.integrations.llama_index.embeddings import LocalEmbedding
from entroprefill_rag.integrations.llama_index.events import EntroPrefillAuditEvent
from entroprefill_rag.integrations.llama_index.llm import EntroPrefillLLM, backend_from_llm
from entroprefill_rag.integrations.llama_index.nodes import RetainedNode, get_audit
from entroprefill_rag.integrations.llama_index.postprocessor import EntroPrefillPostprocessor
from entroprefill_rag.integrations.llama_index.query_engine import EntroPrefillQueryEngine
from entroprefill_rag.integrations.llama_index.responses import (
    AsyncEntroPrefillStreamingResponse,
    EntroPrefillResponse,
    EntroPrefillStreamingResponse,
)
from entroprefill_rag.integrations.llama_index.synthesizer import EntroPrefillSynthesizer

__all__ = [
    "AsyncEntroPrefillStreamingResponse",
    "EntroPrefillAuditEvent",
    "EntroPrefillLLM",
    "EntroPrefillPostprocessor",
    "EntroPrefillQueryEngine",
    "EntroPrefillResponse",
    "EntroPrefillStreamingResponse",
    "EntroPrefillSynthesizer",
    "LocalEmbedding",
    "RetainedNode",
    "backend_from_llm",
    "get_audit",
    "set_default_backend",
]
