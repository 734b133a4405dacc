"""Events and spans: every start has its end, also for errors, and for streams that nobody reads to the end."""

from __future__ import annotations

import contextvars
import inspect
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.base import BaseEvent
from llama_index.core.instrumentation.events.llm import (
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.schema import NodeWithScore, QueryBundle

from entroprefill_rag.record import GenerationResult, Usage

if TYPE_CHECKING:
    from llama_index.core.llms import LLM

dispatcher = get_dispatcher(__name__)


class EntroPrefillAuditEvent(BaseEvent):
    """What one run kept and dropped, and what that is worth: the record in brief."""

    audit: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name of the event."""
        return "EntroPrefillAuditEvent"


def say_audit(summary: dict[str, Any], span_id: str | None = None) -> None:
    """Emit the audit event."""
    more = {} if span_id is None else {"span_id": span_id}
    dispatcher.event(EntroPrefillAuditEvent(audit=dict(summary), **more))


class Kept:
    """Filled by the body of :func:`reranking`."""

    nodes: list[NodeWithScore]

    def __init__(self) -> None:
        self.nodes = []


@contextmanager
def reranking(
    callbacks: CallbackManager, nodes: list[NodeWithScore], query: QueryBundle, model_name: str
) -> Iterator[Kept]:
    """Start and end of a choice of nodes; after an error the end names no node."""
    kept = Kept()
    # There is no top_n here: as many as came in may stay.
    dispatcher.event(ReRankStartEvent(query=query, nodes=nodes, top_n=len(nodes), model_name=model_name))
    payload: dict[str, Any] = {
        EventPayload.NODES: nodes,
        EventPayload.MODEL_NAME: model_name,
        EventPayload.QUERY_STR: query.query_str,
        EventPayload.TOP_K: len(nodes),
    }
    event_id = callbacks.on_event_start(CBEventType.RERANKING, payload=payload)
    ended: dict[str, Any] = {}
    try:
        yield kept
        ended[EventPayload.NODES] = kept.nodes
    except BaseException as error:
        ended[EventPayload.EXCEPTION] = error
        raise
    finally:
        callbacks.on_event_end(CBEventType.RERANKING, payload=ended, event_id=event_id)
        dispatcher.event(ReRankEndEvent(nodes=kept.nodes))


class ModelCall:
    """Span and events of one answer of the model, from its start to its last token, wherever that is read.

    A span of its own, because a decorated function's span ends when it returns, before the first token of a stream.

    Args:
        llm: whose call it is.
        callbacks: legacy handlers.
        prompt: as text.
        arguments: of the generation.
    """

    def __init__(self, llm: LLM, callbacks: CallbackManager, prompt: str, arguments: dict[str, Any]) -> None:
        self._llm, self._callbacks, self._prompt = llm, callbacks, prompt
        self._text = ""
        self._ended = False
        self.span_id = f"{type(llm).__name__}.answer-{uuid.uuid4()}"
        self._bound = inspect.signature(_answer).bind(prompt)
        # In a context of its own: some handlers set a current span, which must not outlive this call in the caller's.
        contextvars.copy_context().run(
            dispatcher.span_enter,
            id_=self.span_id,
            bound_args=self._bound,
            instance=llm,
            parent_id=active_span_id.get(),
            tags={},
        )
        shown = {name: value for name, value in arguments.items() if isinstance(value, (str, int, float, bool))}
        payload: dict[str, Any] = {
            EventPayload.PROMPT: prompt,
            EventPayload.ADDITIONAL_KWARGS: shown,
            EventPayload.SERIALIZED: llm.to_dict(),
        }
        dispatcher.event(
            LLMCompletionStartEvent(
                prompt=prompt, additional_kwargs=shown, model_dict=llm.to_dict(), span_id=self.span_id
            )
        )
        self._event_id = callbacks.on_event_start(CBEventType.LLM, payload=payload)

    def piece(self, text: str) -> None:
        """The next piece of the answer."""
        self._text += text
        response = CompletionResponse(text=self._text, delta=text)
        dispatcher.event(LLMCompletionInProgressEvent(prompt=self._prompt, response=response, span_id=self.span_id))

    def end(self, result: GenerationResult | None = None, error: BaseException | None = None) -> None:
        """The end; the first call counts. Without a result the answer was given up or failed."""
        if self._ended:
            return
        self._ended = True
        text = result.answer if result is not None else self._text
        raw: dict[str, Any] = {"finish_reason": result.finish_reason if result is not None else "cancelled"}
        if result is not None:
            raw["usage"] = usage_of(result.usage)
        failed = error is not None and not isinstance(error, GeneratorExit)
        if failed:
            raw["finish_reason"], raw["error"] = "error", type(error).__name__
        response = CompletionResponse(text=text, raw=raw, additional_kwargs=dict(raw.get("usage", {})))
        dispatcher.event(LLMCompletionEndEvent(prompt=self._prompt, response=response, span_id=self.span_id))
        payload: dict[str, Any] = {EventPayload.PROMPT: self._prompt, EventPayload.COMPLETION: response}
        if failed:
            payload[EventPayload.EXCEPTION] = error
        self._callbacks.on_event_end(CBEventType.LLM, payload=payload, event_id=self._event_id)
        if failed:
            dispatcher.span_drop(id_=self.span_id, bound_args=self._bound, instance=self._llm, err=error)
        else:
            dispatcher.span_exit(id_=self.span_id, bound_args=self._bound, instance=self._llm, result=response)


def usage_of(usage: Usage) -> dict[str, int]:
    """Token counts under the names that traces read."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
    }


def _answer(prompt: str) -> None:
    """Signature of the span's call."""
