"""The event loop stays free while the model works."""

import asyncio
import time

import pytest
from lc_cases import QUERY, heartbeat, make_documents

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def slow(backend):
    """Half a second per prefill and 50 ms per token more, in the model's own thread."""

    def wait(module, args, kwargs):
        time.sleep(0.5 if kwargs["input_ids"].shape[1] > 1 else 0.05)

    handle = backend.anatomy.decoder.register_forward_pre_hook(wait, with_kwargs=True)
    yield
    handle.remove()


async def drain(stream):
    return [piece async for piece in stream]


async def test_f10_the_event_loop_stays_free_during_a_long_prefill(slow, ep, chat, compressor, documents):
    given = {"input": QUERY, "context": documents}
    await ep.ainvoke(given)
    for call in (
        lambda: ep.ainvoke(given),
        lambda: drain(ep.astream(given)),
        lambda: ep.abatch([given] * 2),
        lambda: chat.ainvoke(QUERY, documents=documents),
        lambda: drain(chat.astream(QUERY, documents=documents)),
        lambda: compressor.acompress_documents(documents, QUERY),
        lambda: compressor.as_runnable().ainvoke(given),
    ):
        gaps = []
        # A call that blocks does so every time; a busy machine does not.
        while len(gaps) < 3 and (not gaps or gaps[-1] > 0.25):
            started = time.perf_counter()
            gap, _ = await heartbeat(call())
            gaps.append(gap)
            assert time.perf_counter() - started > 0.5
        assert min(gaps) < 0.25


async def test_f09_gathered_calls_equal_serial_ones(ep):
    inputs = [{"input": f"{QUERY} {i}", "context": make_documents(4 + i)} for i in range(4)]
    serial = [ep.invoke(each)["answer"] for each in inputs]
    together = await asyncio.gather(*(ep.ainvoke(each) for each in inputs))
    assert [output["answer"] for output in together] == serial


async def test_f11_a_cancelled_call_gives_its_turn_back(slow, ep, documents):
    given = {"input": QUERY, "context": documents}
    task = asyncio.create_task(ep.ainvoke(given, max_tokens=100))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await asyncio.wait_for(ep.ainvoke(given), 20))["answer"]
