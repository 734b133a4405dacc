"""EntroPrefillRunnable: a question and retrieved documents in; an answer, the retained documents and the record out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.utils import AddableDict
from pydantic import BaseModel, ConfigDict, Field

from entroprefill_rag.errors import RequestError
from entroprefill_rag.integrations.langchain import messages as conversation
from entroprefill_rag.integrations.langchain.audit import RECORD, SUMMARY
from entroprefill_rag.integrations.langchain.batching import OneAtATime
from entroprefill_rag.integrations.langchain.chat_model import ChatEntroPrefill
from entroprefill_rag.integrations.langchain.documents import Retrieved
from entroprefill_rag.integrations.langchain.settings import GenerationSettings


class RagInput(BaseModel):
    """What goes in; further keys are left alone."""

    model_config = ConfigDict(extra="allow")

    input: str | None = Field(default=None, description="The question. Comes before `question` where both are given.")
    question: str | None = Field(default=None, description="The question, under its other usual name.")
    context: list[Document] = Field(description="Retrieved documents, in the order they are shown.")
    instruction: str | None = Field(default=None, description="What the model is told to do; None: the prompt's own.")
    chat_history: list[Any] | None = Field(
        default=None, description="Earlier turns, oldest first: messages or (role, content) pairs."
    )


class RagOutput(BaseModel):
    """What comes out."""

    input: str = Field(description="The question.")
    context: list[Document] = Field(description="The retained documents, in their original order.")
    answer: str
    retained_ids: list[str] = Field(description="Ids of the retained documents.")
    dropped: list[dict[str, Any]] = Field(description="Id and position of each document that was removed.")
    entroprefill: dict[str, Any] = Field(description="Summary of the record.")
    usage_metadata: dict[str, Any] | None = Field(default=None, description="Token counts.")
    entroprefill_record: dict[str, Any] | None = Field(
        default=None, description="The full record, with include_record='full'."
    )


@dataclass(frozen=True)
class _Question:
    """One input, read."""

    query: str
    messages: list[BaseMessage]
    retrieved: Retrieved

    @classmethod
    def of(cls, given: Any) -> _Question:
        if not isinstance(given, Mapping):
            raise RequestError(
                f"the input is a {type(given).__name__}; pass {{'input': question, 'context': documents}}, for example "
                "with {'context': retriever, 'input': RunnablePassthrough()} before this runnable"
            )
        if given.get("context") is None:
            raise RequestError(
                f"the input has no 'context' (it has {sorted(map(str, given))}); pass the retrieved documents there, "
                "or [] for none"
            )
        asked = given.get("input") if given.get("input") is not None else given.get("question")
        query = conversation.question(asked)
        instruction = given.get("instruction") or ""
        if not isinstance(instruction, str):
            raise RequestError(f"the instruction is a {type(instruction).__name__}; pass text")
        messages = conversation.write(query, instruction, given.get("chat_history"))
        return cls(query, messages, Retrieved.of(given["context"]))

    def known(self, summary: Mapping[str, Any]) -> AddableDict:
        """All but the answer: known when pruning is done."""
        return AddableDict(
            input=self.query,
            context=self.retrieved.retained(summary["retained_ids"]),
            retained_ids=list(summary["retained_ids"]),
            dropped=self.retrieved.places(summary["dropped_ids"]),
            entroprefill=dict(summary),
        )


class EntroPrefillRunnable(GenerationSettings, OneAtATime, RunnableSerializable[dict[str, Any], dict[str, Any]]):
    """Answers a question over retrieved documents, of which the least attended are dropped in mid-prefill.

    Input: ``{"input" | "question", "context", "instruction"?, "chat_history"?}``. Output: ``input``, ``context`` (the
    retained documents), ``answer``, ``retained_ids``, ``dropped``, ``entroprefill`` (the record's summary). In a
    stream, all but the answer come before its first token. The model is called as :class:`ChatEntroPrefill`, so
    callbacks and traces see a chat model at work.

    Example:
        >>> chain = {"context": retriever, "input": RunnablePassthrough()} | EntroPrefillRunnable()  # doctest: +SKIP
        >>> chain.invoke("Who wrote it?")["answer"]  # doctest: +SKIP
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    @cached_property
    def _chat(self) -> ChatEntroPrefill:
        shared = {name: getattr(self, name) for name in GenerationSettings.model_fields}
        return ChatEntroPrefill(**shared)

    def get_input_schema(self, config: RunnableConfig | None = None) -> type[BaseModel]:
        """Keys of the input."""
        return RagInput

    def get_output_schema(self, config: RunnableConfig | None = None) -> type[BaseModel]:
        """Keys of the output."""
        return RagOutput

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """Answer one question; ``kwargs`` are those of a call of :class:`ChatEntroPrefill`.

        Raises:
            RequestError: no question, no documents, or a request that cannot be laid out as a prompt.
        """
        answered: dict[str, Any] = self._call_with_config(self._invoke, input, config, **kwargs)
        return answered

    async def ainvoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """:meth:`invoke`; the event loop stays free."""
        answered: dict[str, Any] = await self._acall_with_config(self._ainvoke, input, config, **kwargs)
        return answered

    def stream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        """Answer piece by piece: first all that pruning decides, then the answer. Pieces add up with ``+``."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """:meth:`stream`; the event loop stays free."""

        async def once() -> AsyncIterator[dict[str, Any]]:
            yield input

        async for piece in self.atransform(once(), config, **kwargs):
            yield piece

    def transform(
        self, input: Iterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        """:meth:`stream` over an input that comes in pieces."""
        yield from self._transform_stream_with_config(input, self._transform, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """:meth:`transform`; the event loop stays free."""
        async for piece in self._atransform_stream_with_config(input, self._atransform, config, **kwargs):
            yield piece

    def _invoke(
        self, given: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> dict[str, Any]:
        asked = _Question.of(given)
        child = patch_config(config, callbacks=run_manager.get_child())
        message = self._chat.invoke(asked.messages, child, documents=asked.retrieved.documents, **kwargs)
        return _output(asked, message)

    async def _ainvoke(
        self, given: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> dict[str, Any]:
        asked = _Question.of(given)
        child = patch_config(config, callbacks=run_manager.get_child())
        message = await self._chat.ainvoke(asked.messages, child, documents=asked.retrieved.documents, **kwargs)
        return _output(asked, message)

    def _transform(
        self, given: Iterator[Any], run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        whole: Any = None
        for piece in given:
            whole = _joined(whole, piece)
        asked = _Question.of(whole)
        child = patch_config(config, callbacks=run_manager.get_child())
        said = False
        for message in self._chat.stream(asked.messages, child, documents=asked.retrieved.documents, **kwargs):
            for out in _pieces(asked, message, said):
                said = said or "answer" in out
                yield out

    async def _atransform(
        self,
        given: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        whole: Any = None
        async for piece in given:
            whole = _joined(whole, piece)
        asked = _Question.of(whole)
        child = patch_config(config, callbacks=run_manager.get_child())
        said = False
        async for message in self._chat.astream(asked.messages, child, documents=asked.retrieved.documents, **kwargs):
            for out in _pieces(asked, message, said):
                said = said or "answer" in out
                yield out


def _joined(whole: Any, piece: Any) -> Any:
    """Input so far, and the next piece of it."""
    if whole is None:
        return piece
    if isinstance(whole, Mapping) and isinstance(piece, Mapping):
        return AddableDict(whole) + AddableDict(piece)
    return whole + piece


def _text(message: AIMessage) -> str:
    return conversation.text_of(message)


def _output(asked: _Question, message: AIMessage) -> dict[str, Any]:
    metadata = message.response_metadata
    return {
        **asked.known(metadata[SUMMARY]),
        "answer": _text(message),
        **_ended(message),
    }


def _ended(message: AIMessage) -> dict[str, Any]:
    """What is known when the answer is complete."""
    made: dict[str, Any] = {}
    if message.usage_metadata is not None:
        made["usage_metadata"] = dict(message.usage_metadata)
    if RECORD in message.response_metadata:
        made[RECORD] = message.response_metadata[RECORD]
    return made


def _pieces(asked: _Question, message: AIMessage, said: bool) -> Iterator[AddableDict]:
    """What one message chunk adds to the output."""
    if SUMMARY in message.response_metadata:
        yield asked.known(message.response_metadata[SUMMARY])
    ended = _ended(message)
    text = _text(message)
    if text or (ended and not said):
        yield AddableDict(answer=text)
    if ended:
        yield AddableDict(ended)
