"""Streams and async calls: order, errors, and clean ways out."""

import asyncio
import contextvars
import gc
import threading
import time

import pytest

from entroprefill_rag.engine.run import RunCancelled
from entroprefill_rag.engine.workers import Workers, aiterate, iterate


def counting(last, cancelled, step=0.0):
    """Work that emits 0, 1, 2, ... and returns ``last``; leaves as a cancelled run does."""

    def work(emit):
        for number in range(last):
            if cancelled.is_set():
                raise RunCancelled
            emit(number)
            time.sleep(step)
        return last

    return work


def stream_threads():
    return [thread for thread in threading.enumerate() if thread.name == "entroprefill-stream"]


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_items_come_in_order_and_the_result_is_the_last():
    cancelled = threading.Event()
    assert list(iterate(counting(5, cancelled), cancelled)) == [0, 1, 2, 3, 4, 5]


def test_nothing_starts_before_the_first_item_is_asked_for():
    started = threading.Event()
    items = iterate(lambda emit: started.set() or 1, threading.Event())
    assert not started.wait(0.05)
    assert next(items) == 1
    assert started.is_set()


def test_an_error_reaches_the_consumer_after_the_items_before_it():
    def work(emit):
        emit(1)
        raise ValueError("no more")

    items = iterate(work, threading.Event())
    assert next(items) == 1
    with pytest.raises(ValueError, match="no more"):
        next(items)
    assert not stream_threads()


@pytest.mark.parametrize("leave", ["break", "close", "garbage"])
def test_leaving_early_ends_the_worker(leave):
    cancelled = threading.Event()
    items = iterate(counting(10_000, cancelled, step=0.001), cancelled)
    if leave == "break":
        for _ in items:
            break
        items.close()
    elif leave == "close":
        next(items)
        items.close()
    else:
        next(items)
        del items
        gc.collect()
    assert cancelled.is_set()
    assert wait_until(lambda: not stream_threads())


def test_two_interleaved_streams_of_one_thread_do_not_wait_for_each_other():
    events = [threading.Event(), threading.Event()]
    first, second = (iterate(counting(3, event), event) for event in events)
    assert [next(first), next(second), next(first), next(second)] == [0, 0, 1, 1]
    assert list(first) == [2, 3]
    assert list(second) == [2, 3]


def test_the_callers_context_goes_along():
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("mine")
    assert list(iterate(lambda emit: variable.get(), threading.Event())) == ["mine"]


def test_an_async_stream_gives_the_same_items_and_keeps_the_loop_free():
    async def main():
        cancelled = threading.Event()
        beats = 0

        async def heart():
            nonlocal beats
            while True:
                await asyncio.sleep(0.005)
                beats += 1

        task = asyncio.create_task(heart())
        got = [item async for item in aiterate(counting(10, cancelled, step=0.01), cancelled)]
        task.cancel()
        return got, beats

    got, beats = asyncio.run(main())
    assert got == list(range(11))
    assert beats >= 5


def test_closing_an_async_stream_ends_the_worker():
    async def main():
        cancelled = threading.Event()
        items = aiterate(counting(10_000, cancelled, step=0.001), cancelled)
        await anext(items)
        await items.aclose()
        return cancelled.is_set()

    assert asyncio.run(main())
    assert wait_until(lambda: not stream_threads())


def test_an_async_error_reaches_the_consumer():
    def work(emit):
        raise ValueError("broken")

    async def main():
        return [item async for item in aiterate(work, threading.Event())]

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())


def test_cancelling_a_task_tells_the_call():
    async def main():
        workers = Workers(1)
        cancelled = threading.Event()
        task = asyncio.create_task(workers.call(lambda: cancelled.wait(5), cancelled))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        workers.close()
        return cancelled.is_set()

    assert asyncio.run(main())


def test_no_more_calls_run_at_once_than_threads():
    async def main():
        workers = Workers(2)
        lock = threading.Lock()
        running = most = 0

        def call():
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.02)
            with lock:
                running -= 1

        await asyncio.gather(*(workers.call(call) for _ in range(8)))
        workers.close()
        return most

    assert asyncio.run(main()) == 2
