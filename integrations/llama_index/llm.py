"""The local model as an LLM of LlamaIndex, and a LlamaIndex LLM's weights as a backend."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import (
    astream_completion_response_to_chat_response,
    completion_response_to_chat_response,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms import LLM, CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.settings import Settings

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import ConfigError, ModelSourceError
from entroprefill_rag.integrations._shared import BackendSource, restyled
from entroprefill_rag.integrations.llama_index.events import usage_of
from entroprefill_rag.record import GenerationResult
from entroprefill_rag.request import RagRequest

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.engine.prompt_style import PromptStyle

logger = logging.getLogger(__name__)

_OFF = PruningConfig(enabled=False)


class EntroPrefillLLM(CustomLLM):
    """The backend's model for everything that has no documents, such as condensing a chat. Loads on first use.

    Nothing is pruned here: a prompt alone does not say where its documents are. Asynchronous calls run in the backend's
    worker threads, not on the event loop.
    """

    model_name: str = Field(default="default", description="Which model; shown in traces.")
    context_window: int = Field(default=4096, gt=0, description="Tokens, as LlamaIndex counts them before loading.")
    max_new_tokens: int = Field(default=256, gt=0, description="Most tokens of an answer.")
    _source: BackendSource = PrivateAttr()

    def __init__(self, source: BackendSource | None = None, **data: Any) -> None:
        source = source or BackendSource(model=_named(data.get("model_name")))
        data.setdefault("model_name", source.name)
        super().__init__(**data)
        self._source = source

    @classmethod
    def class_name(cls) -> str:
        """Name for serialization."""
        return "EntroPrefillLLM"

    def __setstate__(self, state: dict[str, Any]) -> None:
        # LlamaIndex makes an unpickled component anew from its fields, which name no backend given as an object.
        super().__setstate__(state)
        source = (state.get("__pydantic_private__") or {}).get("_source")
        if source is not None:
            self._source = source

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex wants to know; loads nothing."""
        window = self.context_window
        if self._source.loaded:
            window = getattr(self._source.get().anatomy.config, "max_position_embeddings", None) or window
        return LLMMetadata(
            context_window=window,
            num_output=self.max_new_tokens,
            is_chat_model=False,
            model_name=self._source.name,
        )

    def _asked(self, prompt: str, kwargs: dict[str, Any]) -> tuple[LocalBackend, RagRequest, dict[str, Any]]:
        return (
            restyled(self._source.get(), _bare(self._source.get())),
            RagRequest(query=prompt),
            {"max_new_tokens": self.max_new_tokens, **kwargs},
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The model's answer to a prompt."""
        backend, request, arguments = self._asked(prompt, kwargs)
        return _completion(backend.generate(request, _OFF, **arguments))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """The same in pieces."""
        backend, request, arguments = self._asked(prompt, kwargs)

        def pieces() -> Generator[CompletionResponse]:
            text = ""
            for item in backend.stream(request, _OFF, **arguments):
                if isinstance(item, GenerationResult):
                    yield _completion(item)
                elif (piece := getattr(item, "text", None)) is not None:
                    text += piece
                    yield CompletionResponse(text=text, delta=piece)

        return pieces()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The model's answer to a prompt, from a worker thread."""
        backend, request, arguments = self._asked(prompt, kwargs)
        return _completion(await backend.agenerate(request, _OFF, **arguments))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """The same in pieces."""
        backend, request, arguments = self._asked(prompt, kwargs)

        async def pieces() -> AsyncGenerator[CompletionResponse]:
            text = ""
            items: Any = backend.astream(request, _OFF, **arguments)
            async with aclosing(items):
                async for item in items:
                    if isinstance(item, GenerationResult):
                        yield _completion(item)
                    elif (piece := getattr(item, "text", None)) is not None:
                        text += piece
                        yield CompletionResponse(text=text, delta=piece)

        return pieces()

    def _prompt(self, messages: Sequence[ChatMessage]) -> str:
        if self.messages_to_prompt is None:  # LlamaIndex fills it in when the object is made
            raise ConfigError("messages_to_prompt is None; leave it out to have LlamaIndex's default")
        return str(self.messages_to_prompt(messages))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The model's answer to messages, from a worker thread."""
        prompt = self._prompt(messages)
        return completion_response_to_chat_response(await self.acomplete(prompt, formatted=True, **kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """The same in pieces."""
        prompt = self._prompt(messages)
        return astream_completion_response_to_chat_response(
            await self.astream_complete(prompt, formatted=True, **kwargs)
        )


def backend_from_llm(llm: Any, *, style: PromptStyle | None = None, workers: int = 4) -> LocalBackend:
    """A backend on the weights that a ``HuggingFaceLLM`` has loaded already; nothing is loaded twice.

    Reads its attributes ``_model`` and ``_tokenizer``, which are not public; the model gets our hooks, which do nothing
    outside our own calls.

    Args:
        llm: a ``HuggingFaceLLM``, or our own ``EntroPrefillLLM``.
        style: how prompts are written.
        workers: threads for asynchronous calls.

    Raises:
        ModelSourceError: the LLM holds no local model.
    """
    if isinstance(llm, EntroPrefillLLM):
        return restyled(llm._source.get(), style)
    model, tokenizer = getattr(llm, "_model", None), getattr(llm, "_tokenizer", None)
    if model is None or tokenizer is None or not hasattr(model, "generate"):
        raise ModelSourceError(
            f"{type(llm).__name__} holds no model of transformers to prune in; pass a HuggingFaceLLM, or name a model: "
            "EntroPrefillPostprocessor(model='...')"
        )
    from entroprefill_rag.engine.backend import LocalBackend

    return LocalBackend(model, tokenizer, name=getattr(llm, "model_name", None), style=style, workers=workers)


def stand_in_for_missing_default(llm: LLM) -> None:
    """Where ``Settings.llm`` is unset and reading it would raise (no OpenAI package, no key), put ``llm`` there.

    ``index.as_query_engine`` reads ``Settings.llm`` even when it is given a synthesizer and needs none. A default
    that works, or that somebody chose, is never replaced.
    """
    if Settings._llm is not None:
        return
    try:
        _ = Settings.llm
    except (ImportError, ValueError):
        logger.info("no default LLM is configured for LlamaIndex; Settings.llm is now the local %s", llm)
        Settings.llm = llm


def _named(model_name: Any) -> str | None:
    return None if model_name in (None, "", "default") else str(model_name)


def _bare(backend: LocalBackend) -> PromptStyle:
    """A prompt without any words of ours."""
    from dataclasses import replace

    return replace(backend.style, instruction="", template="{context}{query}")


def _completion(result: GenerationResult) -> CompletionResponse:
    usage = usage_of(result.usage)
    return CompletionResponse(
        text=result.answer,
        delta="",
        raw={"usage": usage, "finish_reason": result.finish_reason},
        additional_kwargs=dict(usage),
    )
