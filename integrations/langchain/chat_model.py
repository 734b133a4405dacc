"""ChatEntroPrefill: a chat model that takes retrieved documents beside its messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.engine.prompt_style import PromptStyle
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.integrations._shared import summary
from entroprefill_rag.integrations.langchain import messages as conversation
from entroprefill_rag.integrations.langchain.audit import HOW, RECORD, SUMMARY
from entroprefill_rag.integrations.langchain.batching import OneAtATime
from entroprefill_rag.integrations.langchain.documents import Retrieved
from entroprefill_rag.integrations.langchain.settings import GenerationSettings
from entroprefill_rag.integrations.langchain.stopping import StopText, cut
from entroprefill_rag.record import AuditRecord, GenerationResult, PruneResult, Usage
from entroprefill_rag.request import RagRequest

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.engine.streaming import HoldBack, SettledItem

# A conversation without documents says nothing about documents.
PLAIN = PromptStyle(instruction="", template="{context}{query}")
PLAIN_TEXT = PromptStyle(instruction="", template="{instruction}\n\n{history}{context}{query}\n")


@dataclass(frozen=True)
class _Call:
    """One call, ready to run."""

    backend: LocalBackend
    request: RagRequest
    retrieved: Retrieved
    pruning: PruningConfig
    generation: dict[str, Any]
    stops: list[str]
    full: bool

    def summary(self, record: AuditRecord, **more: Any) -> dict[str, Any]:
        return summary(record, mode="full", full_record=HOW, stand_ins=self.retrieved.ids.report(), **more)

    def hold_back(self) -> HoldBack:
        """Lets through what will not be taken back."""
        from entroprefill_rag.engine.streaming import HoldBack

        return HoldBack(self.pruning)

    def first(self, outcome: PruneResult) -> ChatGenerationChunk:
        """Comes before the first token: what was kept, and why."""
        metadata = {SUMMARY: self.summary(outcome.audit), "model_name": self.backend.name}
        return ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=metadata))

    def last(self, result: GenerationResult, stop: StopText) -> ChatGenerationChunk:
        """Comes after the last token: token counts, and the full record if asked for."""
        held = stop.rest()
        reason = "stop" if stop.stopped else result.finish_reason
        metadata: dict[str, Any] = {"finish_reason": reason, **self.record(result)}
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content=held,
                response_metadata=metadata,
                usage_metadata=usage(result.usage),
                chunk_position="last",
            )
        )

    def record(self, result: GenerationResult) -> dict[str, Any]:
        return {RECORD: result.audit.to_dict()} if self.full else {}

    def whole(self, result: GenerationResult) -> ChatResult:
        answer, stopped = cut(result.answer, self.stops)
        metadata = {
            SUMMARY: self.summary(result.audit, usage=result.usage, timings=result.timings),
            "model_name": self.backend.name,
            "finish_reason": "stop" if stopped else result.finish_reason,
            **self.record(result),
        }
        message = AIMessage(content=answer, response_metadata=metadata, usage_metadata=usage(result.usage))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def chunk(self, item: SettledItem, stop: StopText) -> ChatGenerationChunk | None:
        """One item of a stream as a chunk; None where text is held back."""
        if isinstance(item, PruneResult):
            return self.first(item)
        if isinstance(item, GenerationResult):
            return self.last(item, stop)
        text = stop.push(item.text)
        return ChatGenerationChunk(message=AIMessageChunk(content=text)) if text else None


def usage(counts: Usage) -> UsageMetadata:
    """Token counts as LangChain has them; the prompt counts in full, as it was given."""
    return UsageMetadata(
        input_tokens=counts.prompt_tokens,
        output_tokens=counts.generated_tokens,
        total_tokens=counts.prompt_tokens + counts.generated_tokens,
    )


class ChatEntroPrefill(GenerationSettings, OneAtATime, BaseChatModel):
    """A local chat model that drops the documents it attends to least, in mid-prefill.

    System messages are the instruction, earlier turns the history, the last human message the question; all of these
    are protected. Documents come as ``documents=``, in a call or bound; without them the model just answers.
    The record's summary is in ``response_metadata["entroprefill"]``, in a stream on the first chunk.
    A stream takes nothing back: with ``on_drift="restart_full"`` a pruned answer comes when it has ended.

    Example:
        >>> chat = ChatEntroPrefill()  # doctest: +SKIP
        >>> chat.invoke([("human", "Who wrote it?")], documents=retriever.invoke("Who wrote it?"))  # doctest: +SKIP
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    cache: Any = Field(default=False, exclude=True, description="Off: a replayed answer would bring an old record.")
    streaming: bool = Field(default=False, description="Whether `invoke` streams inside, for callbacks.")

    @property
    def _llm_type(self) -> str:
        return "entroprefill"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {
            "model": self.source.name,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            "pruning": self.pruning.model_dump(mode="json"),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "entroprefill"
        params.setdefault("ls_model_name", self.source.name)
        return params

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        # Traces get what was asked, not the documents' texts a second time.
        shown = {**kwargs}
        if kwargs.get("documents") is not None:
            shown["documents"] = list(Retrieved.of(kwargs["documents"]).ids.ids)
        if isinstance(kwargs.get("pruning"), PruningConfig):
            shown["pruning"] = kwargs["pruning"].model_dump(mode="json")
        return super()._get_invocation_params(stop=stop, **shown)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        documents: Sequence[Document] | None = None,
        pruning: PruningConfig | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, documents, pruning, kwargs)
        return call.whole(call.backend.generate(call.request, call.pruning, **call.generation))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        *,
        documents: Sequence[Document] | None = None,
        pruning: PruningConfig | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await self._acall(messages, stop, documents, pruning, kwargs)
        return call.whole(await call.backend.agenerate(call.request, call.pruning, **call.generation))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        documents: Sequence[Document] | None = None,
        pruning: PruningConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, documents, pruning, kwargs)
        text, hold = StopText(call.stops), call.hold_back()
        items: Any = call.backend.stream(call.request, call.pruning, **call.generation)
        with closing(items):
            for settled in chain.from_iterable(map(hold.push, items)):
                chunk = call.chunk(settled, text)
                if chunk is None:
                    continue
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        *,
        documents: Sequence[Document] | None = None,
        pruning: PruningConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = await self._acall(messages, stop, documents, pruning, kwargs)
        text, hold = StopText(call.stops), call.hold_back()
        items: Any = call.backend.astream(call.request, call.pruning, **call.generation)
        async with aclosing(items):
            async for item in items:
                for settled in hold.push(item):
                    chunk = call.chunk(settled, text)
                    if chunk is None:
                        continue
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _acall(self, *args: Any) -> _Call:
        if not self.source.loaded:
            await asyncio.to_thread(self.source.get)
        return self._call(*args)

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        documents: Sequence[Document] | None,
        pruning: PruningConfig | None,
        kwargs: Mapping[str, Any],
    ) -> _Call:
        if kwargs.get("model") not in (None, self.model):
            raise ConfigError(
                f"model={kwargs['model']!r} was given to a call of {self.source.name!r}; weights are not swapped in "
                "mid-flight: make another ChatEntroPrefill(model=...)"
            )
        told = conversation.read(messages)
        retrieved = Retrieved.of(() if documents is None else documents)
        request = RagRequest(
            instruction=told.instruction,
            chunks=retrieved.chunks(self.title_key),
            query=told.query,
            history=told.history,
        )
        backend = self._styled()
        if documents is None:
            chat = bool(getattr(backend.tokenizer, "chat_template", None)) and backend.style.chat is not False
            backend = self._styled(_plain(backend.style, chat))
        return _Call(
            backend=backend,
            request=request,
            retrieved=retrieved,
            pruning=pruning or self.pruning,
            generation=self._generation(stop, {name: value for name, value in kwargs.items() if name != "model"}),
            stops=self._stops(stop),
            full=self.include_record == "full",
        )


def _plain(style: PromptStyle, chat: bool) -> PromptStyle:
    """``style`` for a conversation without documents."""
    words = PLAIN if chat else PLAIN_TEXT
    return PromptStyle(
        instruction=words.instruction,
        template=words.template,
        speakers=style.speakers,
        chat=style.chat,
        chat_template_kwargs=style.chat_template_kwargs,
    )
