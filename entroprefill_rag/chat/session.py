"""The conversation itself: questions become requests with history, answers are streamed and remembered."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from entroprefill_rag.errors import PromptOverflowError, RequestError
from entroprefill_rag.record import AuditRecord, GenerationResult, PruneResult, Timings, Usage
from entroprefill_rag.request import RagRequest, Turn
from entroprefill_rag.retrieval.index import request_chunks

if TYPE_CHECKING:
    from entroprefill_rag.config import PruningConfig
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.engine.streaming import StreamItem
    from entroprefill_rag.retrieval import FolderIndex


@dataclass
class Exchange:
    """A question and what has come of it so far.

    Attributes:
        request: the question, its chunks and the earlier turns that the model read.
        left_out: earlier questions, with their answers, that did not fit beside the chunks.
        record: of the answer; of the decision alone where the answer was stopped.
        timings: as `record`.
        answer: the whole answer, as the model wrote it; None where it was stopped.
        usage: None where it was stopped.
    """

    request: RagRequest
    left_out: int
    record: AuditRecord
    timings: Timings
    answer: str | None = None
    usage: Usage | None = None


@dataclass
class ChatSession:
    """Questions to one store, one after the other; for one thread.

    Args:
        backend: answers.
        index: of the documents, as they were when it was opened.
        config: of pruning.
        top_k: chunks to retrieve for a question.
        max_new_tokens: longest answer.
        remembered: how many earlier questions and answers the model reads again; 0 for none.
    """

    backend: LocalBackend
    index: FolderIndex
    config: PruningConfig
    top_k: int = 20
    max_new_tokens: int = 256
    remembered: int = 3
    history: list[Turn] = field(default_factory=list)
    last: Exchange | None = None

    def ask(self, question: str) -> Generator[StreamItem]:
        """Stream the answer to a question; the chunks are those most like the question alone.

        An answer that is left early, or fails, is no part of the history.

        Raises:
            RequestError: an empty question, or one that does not fit the model.
        """
        self.last = None  # what is looked at next is this answer or none, never another question's
        chunks = tuple(request_chunks(self.index.search(question, self.top_k)))
        request, left_out = self._with_history(RagRequest(chunks=chunks, query=question))
        stream = self._stream(request, self.config)
        with closing(stream):
            for item in stream:
                if isinstance(item, PruneResult):
                    self.last = Exchange(request, left_out, item.audit, item.timings)
                elif isinstance(item, GenerationResult):
                    self.last = Exchange(request, left_out, item.audit, item.timings, item.answer, item.usage)
                    self.history += [Turn(role="user", content=question), Turn(role="assistant", content=item.answer)]
                yield item

    def in_full(self) -> Generator[StreamItem]:
        """Stream an answer to the last request again, with pruning off; history and `last` stay as they are.

        Raises:
            RequestError: there is none.
        """
        yield from self._stream(self.asked().request, self.config.model_copy(update={"enabled": False}))

    def asked(self) -> Exchange:
        """The last exchange.

        Raises:
            RequestError: there is none.
        """
        if self.last is None:
            raise RequestError("there is no answer to look at; ask something first")
        return self.last

    def forget(self) -> None:
        """Begin a new conversation over the same documents."""
        self.history.clear()
        self.last = None

    def _stream(self, request: RagRequest, config: PruningConfig) -> Generator[StreamItem]:
        # Greedy: the same conversation over the same documents gets the same answers.
        stream = self.backend.stream(request, config, max_new_tokens=self.max_new_tokens, do_sample=False)
        return cast("Generator[StreamItem, Any, Any]", stream)

    def _with_history(self, request: RagRequest) -> tuple[RagRequest, int]:
        """The request with as many of the earlier turns as fit, and how many earlier questions do not.

        Documents come first: a turn is left out before a chunk is.
        """
        turns = self.history[-2 * self.remembered :] if self.remembered else []
        for start in range(0, len(turns), 2):
            longer = request.model_copy(update={"history": tuple(turns[start:])})
            try:
                layout = self.backend.layout(longer, self.config, max_new_tokens=self.max_new_tokens)
            except PromptOverflowError:
                continue
            if not layout.not_admitted:
                return longer, start // 2
        return request, len(turns) // 2
