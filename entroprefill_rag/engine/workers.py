"""Threads around a generation: streams that push, async calls that keep the event loop free, and clean ways out."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from entroprefill_rag.engine.run import RunCancelled

Item = TypeVar("Item")
Result = TypeVar("Result")
Emit = Callable[[Item | BaseException], None]
# Runs to its end, handing on items as they come; what it returns is the last item.
Work = Callable[[Callable[[Item], None]], Item]


def _start(work: Work[Item], emit: Emit[Item], finished: Callable[[], None]) -> threading.Thread:
    # `generate` pushes its tokens, so a stream needs a thread. The caller's context (tracing, callbacks) goes along.
    context = contextvars.copy_context()

    def body() -> None:
        try:
            emit(context.run(work, emit))
        except RunCancelled:
            return
        except BaseException as error:  # handed to the consumer, whatever it is
            emit(error)
        finally:
            finished()

    thread = threading.Thread(target=body, name="entroprefill-stream", daemon=True)
    thread.start()
    return thread


class _End(Exception):
    """The worker has left."""


def iterate(work: Work[Item], cancelled: threading.Event) -> Iterator[Item]:
    """Items of ``work``, run in a thread of its own from the first ``next`` on.

    Leaving early (``break``, ``close()``, garbage collection) sets ``cancelled`` and waits for the worker's next step.
    """
    items: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()
    worker = None
    try:
        worker = _start(work, items.put, lambda: items.put(_End()))
        while True:
            item = items.get()
            if isinstance(item, _End):
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        cancelled.set()
        if worker is not None:
            worker.join()


async def aiterate(work: Work[Item], cancelled: threading.Event) -> AsyncGenerator[Item]:
    """:func:`iterate` for an event loop, which stays free between items."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Item | BaseException] = asyncio.Queue()

    def emit(item: Item | BaseException) -> None:
        try:
            loop.call_soon_threadsafe(items.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads on
            cancelled.set()

    try:
        _start(work, emit, lambda: emit(_End()))
        while True:
            item = await items.get()
            if isinstance(item, _End):
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        cancelled.set()


class Workers:
    """A bounded pool of threads for async calls, made on first use; never the event loop's default pool.

    Args:
        threads: most calls at work at the same time.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._made = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    async def call(self, function: Callable[[], Result], cancelled: threading.Event | None = None) -> Result:
        """Run ``function`` in a thread; cancelling the task sets ``cancelled``."""
        with self._made:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="entroprefill")
        context = contextvars.copy_context()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, context.run, function)
        except asyncio.CancelledError:
            if cancelled is not None:
                cancelled.set()
            raise
        except RunCancelled as error:
            raise asyncio.CancelledError from error

    def close(self) -> None:
        """Let running calls end, take no new ones."""
        with self._made:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = None
