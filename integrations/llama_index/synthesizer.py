"""From retrieved nodes to an answer in one pass: prefill, prune, decode; sources are the nodes that were kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, QueryType, TextNode
from llama_index.core.types import RESPONSE_TEXT_TYPE

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.integrations._shared import BackendSource, summary
from entroprefill_rag.integrations.llama_index.answering import Answering
from entroprefill_rag.integrations.llama_index.events import ModelCall, say_audit
from entroprefill_rag.integrations.llama_index.handoff import receive
from entroprefill_rag.integrations.llama_index.llm import EntroPrefillLLM
from entroprefill_rag.integrations.llama_index.nodes import METADATA_KEY, RetainedNode, Trace
from entroprefill_rag.integrations.llama_index.prompts import DEFAULT_TEXT_QA, as_template, check
from entroprefill_rag.integrations.llama_index.responses import (
    AsyncEntroPrefillStreamingResponse,
    EntroPrefillResponse,
    EntroPrefillStreamingResponse,
)
from entroprefill_rag.integrations.llama_index.task import Setup, Task
from entroprefill_rag.record import GenerationResult, PruneResult

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend

dispatcher = get_dispatcher(__name__)


class EntroPrefillSynthesizer(BaseSynthesizer):
    """Answers a question over nodes with the local model, pruning them in the middle of the only prefill.

    Takes over a prefill that an ``EntroPrefillPostprocessor`` has finished, where it answers exactly what is asked;
    else runs one full pass itself, and says so in ``response.metadata["entroprefill"]["handoff"]``.

    Args:
        backend: a local backend; None resolves ``model`` on first use.
        model: a hub id, folder, GGUF file or packaged name; None takes the configured or packaged one.
        config: limits and audit.
        streaming: answer in pieces (``as_query_engine(streaming=True)`` does not reach a synthesizer given to it).
        text_qa_template: text or template with ``{context_str}`` before ``{query_str}``; None: the backend's style.
        instruction: protected text, before everything else.
        metadata_mode: which metadata goes into a node's text.
        empty_response: answer where there are no nodes.
        generation: arguments of the model's ``generate``, such as ``{"max_new_tokens": 100}``.
        callback_manager: legacy handlers.
        llm: shown in traces; the local model by default. It is never asked.
        source: in place of ``backend`` and ``model``, to share one.

    Raises:
        TemplateError: the template does not put all documents before the query.
    """

    def __init__(
        self,
        backend: LocalBackend | None = None,
        *,
        model: str | None = None,
        config: PruningConfig | None = None,
        streaming: bool = False,
        text_qa_template: str | BasePromptTemplate | None = None,
        instruction: str = "",
        metadata_mode: MetadataMode = MetadataMode.LLM,
        empty_response: str | None = None,
        generation: Mapping[str, Any] | None = None,
        callback_manager: CallbackManager | None = None,
        llm: LLM | None = None,
        source: BackendSource | None = None,
    ) -> None:
        self._source = source or BackendSource(backend, model)
        super().__init__(
            llm=llm or EntroPrefillLLM(self._source),
            callback_manager=callback_manager,
            streaming=streaming,
        )
        self._empty_response = empty_response or "Empty Response"  # LlamaIndex's own word
        self._config = config or PruningConfig()
        self._template = as_template(text_qa_template)
        self._instruction = instruction
        self._metadata_mode = metadata_mode
        self._generation = dict(generation or {})

    @property
    def setup(self) -> Setup:
        """How questions are put to the model now."""
        return Setup(
            source=self._source,
            config=self._config,
            metadata_mode=self._metadata_mode,
            instruction=self._instruction,
            template=self._template,
            generation=self._generation,
        )

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._template or DEFAULT_TEXT_QA}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if (new := prompts.get("text_qa_template")) is not None:
            check(new)
            self._template = new

    # -- the whole way --------------------------------------------------------------------------------------------

    @dispatcher.span
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer ``query`` from ``nodes``; further keyword arguments are values of the template's variables."""
        asked = QueryBundle(query) if isinstance(query, str) else query
        dispatcher.event(SynthesizeStartEvent(query=asked))
        response: RESPONSE_TYPE | None = None
        try:
            if not nodes:
                response = self._empty(asynchronous=False)
                return response
            payload = {EventPayload.QUERY_STR: asked.query_str}
            with self._callback_manager.event(CBEventType.SYNTHESIZE, payload=payload) as event:
                task = self.setup.task(nodes, asked.query_str, response_kwargs)
                session = _Session(self, nodes, task, additional_source_nodes or ())
                response = session.stream() if self._streaming else session.answer()
                event.on_end(payload={EventPayload.RESPONSE: response})
            return response
        finally:
            dispatcher.event(SynthesizeEndEvent(query=asked, response=response or EntroPrefillResponse(None)))

    @dispatcher.span
    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """:meth:`synthesize` for an event loop, which stays free."""
        asked = QueryBundle(query) if isinstance(query, str) else query
        dispatcher.event(SynthesizeStartEvent(query=asked))
        response: RESPONSE_TYPE | None = None
        try:
            if not nodes:
                response = self._empty(asynchronous=True)
                return response
            payload = {EventPayload.QUERY_STR: asked.query_str}
            with self._callback_manager.event(CBEventType.SYNTHESIZE, payload=payload) as event:
                task = await self.setup.atask(nodes, asked.query_str, response_kwargs)
                session = _Session(self, nodes, task, additional_source_nodes or ())
                response = await (session.astream() if self._streaming else session.aanswer())
                event.on_end(payload={EventPayload.RESPONSE: response})
            return response
        finally:
            dispatcher.event(SynthesizeEndEvent(query=asked, response=response or EntroPrefillResponse(None)))

    def _empty(self, *, asynchronous: bool) -> RESPONSE_TYPE:
        if not self._streaming:
            return EntroPrefillResponse(self._empty_response)
        if asynchronous:
            return AsyncEntroPrefillStreamingResponse(_aonly(self._empty_response))
        return EntroPrefillStreamingResponse(piece for piece in (self._empty_response,))

    # -- for callers that hold texts only -------------------------------------------------------------------------

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer from bare texts."""
        task = self.setup.task(_texts(text_chunks), query_str, response_kwargs)
        session = _Session(self, list(task.nodes), task, ())
        return session.stream().response_gen if self._streaming else session.answer().response or ""

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from bare texts."""
        task = await self.setup.atask(_texts(text_chunks), query_str, response_kwargs)
        session = _Session(self, list(task.nodes), task, ())
        if self._streaming:
            return (await session.astream()).response_gen
        return (await session.aanswer()).response or ""


class _Session:
    """One call: what is asked, what becomes known, and the response that is made of it."""

    def __init__(
        self, owner: EntroPrefillSynthesizer, nodes: Sequence[NodeWithScore], asked: Task, more: Sequence[NodeWithScore]
    ) -> None:
        task, pending, handoff = receive(nodes, asked)
        self._task = task
        self._handed = handoff is not None and handoff["taken"]
        self._answering = Answering(task, pending)
        # Positions that the task knows, and the nodes for them: the original list where that was asked again.
        self._nodes = _by_position(nodes) if task is not asked else dict(enumerate(asked.nodes))
        self._more = list(more)
        self._trace = Trace()
        self._sources: list[NodeWithScore] = []
        self._metadata: dict[str, Any] = {}
        self._noted = {} if handoff is None else {"handoff": handoff}
        stand_ins = task.ids.report()
        if stand_ins:
            self._noted["stand_in_ids"] = stand_ins
        self._call = ModelCall(owner._llm, owner.callback_manager, task.prompt_text(), dict(asked.setup.generation))

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
        if not self._handed:  # else the postprocessor has said it
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


async def _aonly(text: str) -> AsyncGenerator[str]:
    yield text


def _by_position(nodes: Sequence[NodeWithScore]) -> dict[int, NodeWithScore]:
    return {node.position: node for node in nodes if isinstance(node, RetainedNode)}


def _texts(chunks: Sequence[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, id_=f"text-{at}")) for at, text in enumerate(chunks)]
