"""An answer that waits before its first token: pruned now, decoded when somebody takes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from entroprefill_rag.engine.job import Job
from entroprefill_rag.engine.run import RunCancelled
from entroprefill_rag.engine.streaming import StreamItem
from entroprefill_rag.engine.workers import iterate
from entroprefill_rag.errors import AnswerTakenError
from entroprefill_rag.record import GenerationResult, ModelInfo, PruneResult

Emit = Callable[[StreamItem], None]


class PendingAnswer:
    """A prompt that has been prefilled and pruned, with its cache, in a thread that waits to decode.

    One-shot: :meth:`stream` or :meth:`result` may be called once. :meth:`close`, or losing the last reference, ends the
    thread and frees the cache. Made by :meth:`LocalBackend.begin`, which raises what the prefill raises.

    Attributes:
        outcome: what was kept and dropped; known as soon as the object is there. With ``on_drift="restart_full"`` the
            answer may be given from a full prefill after all: the record of its result has the last word.
    """

    def __init__(self, job: Job, answer: Callable[[Job, Emit], GenerationResult], model: ModelInfo) -> None:
        go = threading.Event()

        def work(emit: Emit) -> StreamItem:
            def gate() -> None:
                emit(job.outcome(model))
                waiting = time.perf_counter()
                # Looks up now and then, so that an answer that was dropped does not wait for ever.
                while not go.wait(timeout=0.1):
                    if job.cancelled.is_set():
                        raise RunCancelled
                job.idle_seconds = time.perf_counter() - waiting

            job.gate = gate
            said = False

            def hand_on(item: StreamItem) -> None:
                nonlocal said
                if isinstance(item, PruneResult) and not said:
                    said = True  # by the gate
                else:
                    emit(item)

            return answer(job, hand_on)

        self._go = go
        self._taken = threading.Lock()
        self._items: Iterator[StreamItem] = iterate(work, job.cancelled)
        outcome = next(self._items)
        if not isinstance(outcome, PruneResult):
            raise RuntimeError(f"the first item of a pending answer was {type(outcome).__name__}")
        self.outcome = outcome

    def stream(self) -> Iterator[StreamItem]:
        """The outcome, then pieces of text as they come, then the GenerationResult; see :meth:`LocalBackend.stream`.

        Raises:
            AnswerTakenError: it was taken or closed before.
        """
        if not self._taken.acquire(blocking=False):
            raise AnswerTakenError("this answer was taken or closed before; a pending answer can be taken once")
        return self._rest()

    def _rest(self) -> Iterator[StreamItem]:
        self._go.set()
        yield self.outcome
        yield from self._items

    def result(self) -> GenerationResult:
        """The whole answer.

        Raises:
            AnswerTakenError: it was taken or closed before.
        """
        last: StreamItem | None = None
        for item in self.stream():
            last = item
        if not isinstance(last, GenerationResult):
            raise RuntimeError("the answer ended without a result")
        return last

    def close(self) -> None:
        """Give the answer up, if nobody has taken it: the thread ends and the cache is freed."""
        if self._taken.acquire(blocking=False):
            close = getattr(self._items, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> PendingAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
