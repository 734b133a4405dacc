"""Getting an answer out of a task: in one piece or as a stream, blocking or for an event loop, fresh or pending."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from entroprefill_rag.integrations.llama_index.events import ModelCall
from entroprefill_rag.integrations.llama_index.task import Task
from entroprefill_rag.record import GenerationResult, PruneResult

if TYPE_CHECKING:
    from entroprefill_rag.engine.pending import PendingAnswer
    from entroprefill_rag.engine.streaming import SettledItem, StreamItem

Known = Callable[[PruneResult], None]


@dataclass(frozen=True)
class Answering:
    """One answer in the making.

    Attributes:
        task: what is asked.
        pending: the prefill to go on from; None for one full pass.
    """

    task: Task
    pending: PendingAnswer | None = None

    def result(self) -> GenerationResult:
        """The whole answer."""
        if self.pending is not None:
            return self.pending.result()
        task = self.task
        return task.backend.generate(task.request, task.setup.config, **task.setup.generation)

    async def aresult(self) -> GenerationResult:
        """The whole answer; the event loop stays free, and cancelling the task ends the generation."""
        task = self.task
        if self.pending is None:
            return await task.backend.agenerate(task.request, task.setup.config, **task.setup.generation)
        last: SettledItem | None = None
        async with aclosing(self._aitems()) as items:
            async for item in items:
                last = item
        if not isinstance(last, GenerationResult):
            raise RuntimeError("the answer ended without a result")
        return last

    def stream(self, call: ModelCall, known: Known, ended: Callable[[GenerationResult], None]) -> Generator[str]:
        """Pieces of text, after a first empty one that comes when it is known what was kept.

        Nothing is ever taken back: with ``on_drift="restart_full"`` a pruned answer comes when it has ended.

        The first piece is for the caller to take: a generator that was never advanced would skip its end.
        """
        try:
            with closing(self._items()) as items:
                for item in items:
                    if isinstance(item, PruneResult):
                        known(item)
                        yield ""
                    elif isinstance(item, GenerationResult):
                        ended(item)
                        call.end(item)
                    else:
                        call.piece(item.text)
                        yield item.text
        except BaseException as error:
            call.end(error=error)
            raise
        finally:
            call.end()

    async def astream(
        self, call: ModelCall, known: Known, ended: Callable[[GenerationResult], None]
    ) -> AsyncGenerator[str]:
        """:meth:`stream` for an event loop."""
        try:
            async with aclosing(self._aitems()) as items:
                async for item in items:
                    if isinstance(item, PruneResult):
                        known(item)
                        yield ""
                    elif isinstance(item, GenerationResult):
                        ended(item)
                        call.end(item)
                    else:
                        call.piece(item.text)
                        yield item.text
        except BaseException as error:
            call.end(error=error)
            raise
        finally:
            call.end()

    def _items(self) -> Generator[SettledItem]:
        from entroprefill_rag.engine.streaming import HoldBack

        task, hold = self.task, HoldBack(self.task.setup.config)
        source: Any
        if self.pending is not None:
            source = self.pending.stream()
        else:
            source = task.backend.stream(task.request, task.setup.config, **task.setup.generation)
        with closing(source):
            for item in source:
                yield from hold.push(item)

    async def _aitems(self) -> AsyncGenerator[SettledItem]:
        from entroprefill_rag.engine.streaming import HoldBack

        hold = HoldBack(self.task.setup.config)
        async with aclosing(self._afresh()) as items:
            async for item in items:
                for settled in hold.push(item):
                    yield settled

    async def _afresh(self) -> AsyncGenerator[StreamItem]:
        task = self.task
        if self.pending is None:
            fresh = task.backend.astream(task.request, task.setup.config, **task.setup.generation)
            async for item in fresh:
                yield item
            return
        from entroprefill_rag.engine.workers import aiterate

        cancelled = threading.Event()
        work = partial(_pump, self.pending, cancelled)
        async with aclosing(aiterate(work, cancelled)) as items:
            async for item in items:
                yield item


def _pump(pending: PendingAnswer, cancelled: threading.Event, emit: Callable[[StreamItem], None]) -> StreamItem:
    """Read a pending answer in a worker thread, up to its end or until nobody wants it any more."""
    from entroprefill_rag.engine.run import RunCancelled

    stream = pending.stream()
    try:
        for item in stream:
            if cancelled.is_set():
                raise RunCancelled
            if isinstance(item, GenerationResult):
                return item
            emit(item)
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    raise RuntimeError("the answer ended without a result")


async def abegin(task: Task) -> PendingAnswer:
    """Prefill and prune in a worker thread."""
    begin = partial(task.backend.begin, task.request, task.setup.config, **task.setup.generation)
    return await task.backend._workers.call(begin)
