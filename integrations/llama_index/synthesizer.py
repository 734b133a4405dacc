"""From retrieved nodes to an answer in one pass: prefill, prune, decode; sources are the nodes that were kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
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
from entroprefill_rag.integrations._shared import BackendSource
from entroprefill_rag.integrations.llama_index.llm import EntroPrefillLLM
from entroprefill_rag.integrations.llama_index.prompts import DEFAULT_TEXT_QA, as_template, check
from entroprefill_rag.integrations.llama_index.responses import (
    AsyncEntroPrefillStreamingResponse,
    EntroPrefillResponse,
    EntroPrefillStreamingResponse,
)
from entroprefill_rag.integrations.llama_index.session import Session
from entroprefill_rag.integrations.llama_index.task import Setup, Task

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
            payload: dict[str, Any] = {EventPayload.QUERY_STR: asked.query_str}
            with self._callback_manager.event(CBEventType.SYNTHESIZE, payload=payload) as event:
                task = self.setup.task(nodes, asked.query_str, response_kwargs)
                session = self._session(task, nodes, additional_source_nodes)
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
            payload: dict[str, Any] = {EventPayload.QUERY_STR: asked.query_str}
            with self._callback_manager.event(CBEventType.SYNTHESIZE, payload=payload) as event:
                task = await self.setup.atask(nodes, asked.query_str, response_kwargs)
                session = self._session(task, nodes, additional_source_nodes)
                response = await (session.astream() if self._streaming else session.aanswer())
                event.on_end(payload={EventPayload.RESPONSE: response})
            return response
        finally:
            dispatcher.event(SynthesizeEndEvent(query=asked, response=response or EntroPrefillResponse(None)))

    def _session(
        self, task: Task, nodes: Sequence[NodeWithScore], more: Sequence[NodeWithScore] | None = None
    ) -> Session:
        return Session(task, nodes, more or (), llm=self._llm, callbacks=self.callback_manager)

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
        session = self._session(task, task.nodes)
        return session.stream().response_gen if self._streaming else session.answer().response or ""

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from bare texts."""
        task = await self.setup.atask(_texts(text_chunks), query_str, response_kwargs)
        session = self._session(task, task.nodes)
        if self._streaming:
            return (await session.astream()).response_gen
        return (await session.aanswer()).response or ""


async def _aonly(text: str) -> AsyncGenerator[str]:
    yield text


def _texts(chunks: Sequence[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, id_=f"text-{at}")) for at, text in enumerate(chunks)]
