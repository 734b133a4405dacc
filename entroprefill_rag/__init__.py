"""Drop the retrieved chunks that a question attends to least, in mid-prefill, and record what was lost.

Every public name is loaded on first use: importing the package loads neither torch nor a framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entroprefill_rag.config import AuditConfig, PruningConfig
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.ledger import ReuseLedger
    from entroprefill_rag.record import AuditRecord, GenerationResult, PruneResult
    from entroprefill_rag.request import Chunk, RagRequest

__version__ = "0.1.0"

_HOMES = {
    "AuditConfig": "entroprefill_rag.config",
    "AuditRecord": "entroprefill_rag.record",
    "Chunk": "entroprefill_rag.request",
    "GenerationResult": "entroprefill_rag.record",
    "LocalBackend": "entroprefill_rag.engine.backend",
    "PruneResult": "entroprefill_rag.record",
    "PruningConfig": "entroprefill_rag.config",
    "RagRequest": "entroprefill_rag.request",
    "ReuseLedger": "entroprefill_rag.ledger",
}

__all__ = [
    "AuditConfig",
    "AuditRecord",
    "Chunk",
    "GenerationResult",
    "LocalBackend",
    "PruneResult",
    "PruningConfig",
    "RagRequest",
    "ReuseLedger",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
