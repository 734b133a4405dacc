"""Responses that carry the record, otherwise LlamaIndex's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse

from entroprefill_rag.integrations.llama_index.nodes import Trace
from entroprefill_rag.record import AuditRecord


@dataclass
class EntroPrefillResponse(Response):
    """An answer and the full record of how it came about."""

    trace: Trace = field(default_factory=Trace, repr=False)

    @property
    def audit(self) -> AuditRecord | None:
        """The full record; None where there were no nodes."""
        return self.trace.audit


@dataclass
class EntroPrefillStreamingResponse(StreamingResponse):
    """A stream whose record is there before its first token, and is completed at its end."""

    trace: Trace = field(default_factory=Trace, repr=False)

    @property
    def audit(self) -> AuditRecord | None:
        """The full record; None where there were no nodes. The dual bound comes with the end of the stream."""
        return self.trace.audit

    def get_response(self) -> EntroPrefillResponse:
        """Read to the end, as a response with the record."""
        whole = super().get_response()
        return EntroPrefillResponse(whole.response, whole.source_nodes, whole.metadata, trace=self.trace)


@dataclass
class AsyncEntroPrefillStreamingResponse(AsyncStreamingResponse):
    """The same for an event loop."""

    trace: Trace = field(default_factory=Trace, repr=False)

    @property
    def audit(self) -> AuditRecord | None:
        """The full record; None where there were no nodes. The dual bound comes with the end of the stream."""
        return self.trace.audit

    async def get_response(self) -> EntroPrefillResponse:
        """Read to the end, as a response with the record."""
        whole: Any = await super().get_response()
        return EntroPrefillResponse(whole.response, whole.source_nodes, whole.metadata, trace=self.trace)
