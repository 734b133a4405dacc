"""From a question to the events of its answer, as they come: sources first, then text, then what it took."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from entroprefill_rag.app import view
from entroprefill_rag.app.loading import Loaded
from entroprefill_rag.app.visits import Visit
from entroprefill_rag.chat.session import Exchange
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import RequestError
from entroprefill_rag.record import GenerationResult, PruneResult
from entroprefill_rag.report.plain import PlainStream, one_line, plain
from entroprefill_rag.request import RagRequest
from entroprefill_rag.retrieval.index import request_chunks

Event = dict[str, Any]


@dataclass(frozen=True)
class Answering:
    """How questions are answered.

    Attributes:
        config: of pruning.
        top_k: chunks to retrieve.
        max_new_tokens: longest answer.
        embedding: held while the embedder runs; its library does not promise that two threads may share it.
    """

    config: PruningConfig
    top_k: int
    max_new_tokens: int
    embedding: threading.Lock

    async def ask(self, question: str, loaded: Loaded, visit: Visit) -> AsyncGenerator[Event]:
        """Retrieve and answer.

        Raises:
            RequestError: an empty question, no documents, or a prompt that does not fit.
        """
        request = await asyncio.to_thread(self._retrieve, question, loaded, visit)
        yield {"type": "retrieved", "chunks": len(request.chunks)}
        async with aclosing(self._stream(request, self.config, loaded, visit)) as events:
            async for event in events:
                yield event

    async def in_full(self, name: str, loaded: Loaded, visit: Visit) -> AsyncGenerator[Event]:
        """Answer the same request again without pruning.

        Raises:
            RequestError: there is no such answer any more.
        """
        exchange = answer_of(visit, name)
        config = self.config.model_copy(update={"enabled": False})
        async with aclosing(self._stream(exchange.request, config, loaded, visit)) as events:
            async for event in events:
                if event["type"] == "done":
                    event["same"] = visit.answers[event["id"]].answer == exchange.answer
                yield event

    def _retrieve(self, question: str, loaded: Loaded, visit: Visit) -> RagRequest:
        index = visit.index(loaded.base)
        with self.embedding:
            hits = index.search(question, self.top_k)
        return RagRequest(chunks=tuple(request_chunks(hits)), query=question)

    async def _stream(
        self, request: RagRequest, config: PruningConfig, loaded: Loaded, visit: Visit
    ) -> AsyncGenerator[Event]:
        from entroprefill_rag.engine.backend import Restarted, TextPiece

        # Greedy: the same question to the same documents gets the same answer.
        items = loaded.backend.astream(request, config, max_new_tokens=self.max_new_tokens, do_sample=False)
        shown = PlainStream()
        async with aclosing(cast("AsyncGenerator[Any]", items)) as stream:
            async for item in stream:
                if isinstance(item, PruneResult):
                    yield {"type": "decision", **view.decision(Exchange(request, 0, item.audit, item.timings))}
                elif isinstance(item, TextPiece):
                    if text := shown.feed(item.text):
                        yield {"type": "text", "text": text}
                elif isinstance(item, Restarted):
                    shown = PlainStream()
                    yield {"type": "restarted", "message": one_line(item.reason.message, 400)}
                elif isinstance(item, GenerationResult):
                    exchange = Exchange(request, 0, item.audit, item.timings, item.answer, item.usage)
                    if text := shown.close():
                        yield {"type": "text", "text": text}
                    yield {
                        "type": "done",
                        "id": visit.remember(exchange),
                        "answer": plain(item.answer).strip(),
                        "finish": item.finish_reason,
                        **view.run(exchange),
                        **view.decision(exchange),
                    }


def answer_of(visit: Visit, name: str) -> Exchange:
    """An earlier answer.

    Raises:
        RequestError: it is not remembered.
    """
    exchange = visit.answers.get(name)
    if exchange is None:
        raise RequestError("this answer is no longer remembered; ask again")
    return exchange
