"""One call of the synthesizer, from a task to a response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.schema import NodeWithScore

from entroprefill_rag.integrations._shared import summary
from entroprefill_rag.integrations.llama_index.answering import Answering
from entroprefill_rag.integrations.llama_index.events import ModelCall, say_audit
from entroprefill_rag.integrations.llama_index.handoff import receive
from entroprefill_rag.integrations.llama_index.nodes import METADATA_KEY, RetainedNode, Trace
from entroprefill_rag.integrations.llama_index.responses import (
    AsyncEntroPrefillStreamingResponse,
    EntroPrefillResponse,
    EntroPrefillStreamingResponse,
)
from entroprefill_rag.integrations.llama_index.task import Task
from entroprefill_rag.record import GenerationResult, PruneResult


class Session:
    """One call: what is asked, what becomes known, and the response that is made of it.

    Args:
        asked: the question over the nodes given; a prefill that the nodes carry is taken over if it answers it.
        nodes: the nodes given.
        more: sources to name after the retained ones.
        llm: whose call it is in traces.
        callbacks: legacy handlers.
    """

    def __init__(
        self,
        asked: Task,
        nodes: Sequence[NodeWithScore],
        more: Sequence[NodeWithScore],
        *,
        llm: LLM,
        callbacks: CallbackManager,
    ) -> None:
        task, pending, handoff = receive(nodes, asked)
        self._task = task
        self._handed = handoff is not None and handoff["taken"]
        self._answering = Answering(task, pending)
        # Positions that the task knows, and the nodes for them: the original list where that was asked again.
        self._nodes: dict[int, NodeWithScore] = dict(enumerate(task.nodes))
        if task is not asked:
            self._nodes |= _by_position(nodes)
        self._more = list(more)
        self._trace = Trace()
        self._sources: list[NodeWithScore] = []
        self._metadata: dict[str, Any] = {}
        self._noted: dict[str, Any] = {} if handoff is None else {"handoff": handoff}
        stand_ins = task.ids.report()
        if stand_ins:
            self._noted["stand_in_ids"] = stand_ins
        self._call = ModelCall(llm, callbacks, task.prompt_text(), dict(asked.setup.generation))

    def answer(self) -> EntroPrefillResponse:
        """Blocking, in one piece."""
        with self._ending():
            result = self._answering.result()
            return self._whole(result)

    async def aanswer(self) -> EntroPrefillResponse:
        """For an event loop, in one piece."""
        with self._ending():
            result = await self._answering.aresult()
            return self._whole(result)

    def stream(self) -> EntroPrefillStreamingResponse:
        """Blocking, in pieces."""
        pieces: Generator[str] = self._answering.stream(self._call, self._known, self._ended)
        next(pieces)
        return EntroPrefillStreamingResponse(pieces, self._sources, self._metadata, trace=self._trace)

    async def astream(self) -> AsyncEntroPrefillStreamingResponse:
        """For an event loop, in pieces."""
        pieces: AsyncGenerator[str] = self._answering.astream(self._call, self._known, self._ended)
        await anext(pieces)
        return AsyncEntroPrefillStreamingResponse(pieces, self._sources, self._metadata, trace=self._trace)

    def _ending(self) -> _Ending:
        return _Ending(self._call)

    def _whole(self, result: GenerationResult) -> EntroPrefillResponse:
        self._known(result)
        self._ended(result)
        self._call.end(result)
        return EntroPrefillResponse(result.answer, self._sources, self._metadata, trace=self._trace)

    def _known(self, outcome: PruneResult | GenerationResult) -> None:
        """Before the first token: sources, record, summary."""
        self._summarise(outcome)
        for position in self._task.kept(outcome):
            given = self._nodes.get(position)
            if given is not None:
                new = RetainedNode(node=given.node, score=given.score)
                new._trace, new._position = self._trace, position
                self._sources.append(new)
        self._sources += self._more
        self._metadata.update({each.node.node_id: each.node.metadata for each in self._sources})
        self._metadata[METADATA_KEY] = self._trace.summary
        # What was handed over the postprocessor has said already, unless the answer came to be another one.
        if not self._handed or outcome.audit.reason.code == "drift_restart":
            say_audit(self._trace.summary, self._call.span_id)

    def _ended(self, result: GenerationResult) -> None:
        self._summarise(result)

    def _summarise(self, found: PruneResult | GenerationResult) -> None:
        self._trace.audit = found.audit
        usage = found.usage if isinstance(found, GenerationResult) else None
        more = dict(self._noted)
        if isinstance(found, GenerationResult):
            more["finish_reason"] = found.finish_reason
        mode = "handoff" if self._handed else "full"
        self._trace.summary.update(summary(found.audit, mode=mode, usage=usage, timings=found.timings, **more))


class _Ending:
    """Ends a model call on an error."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None:
            self._call.end(error=error)


def _by_position(nodes: Sequence[NodeWithScore]) -> dict[int, NodeWithScore]:
    return {node.position: node for node in nodes if isinstance(node, RetainedNode)}
