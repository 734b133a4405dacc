"""A pruned answer that drifts: what has been handed to LangChain is never taken back."""

from __future__ import annotations

import asyncio

import pytest
from lc_cases import QUERY, SEEDED, Written, ids

from entroprefill_rag.integrations.langchain import ChatEntroPrefill, EntroPrefillRunnable


def drifting(on_drift, threshold=0.05):
    return SEEDED.model_copy(update={"on_drift": on_drift, "drift_threshold": threshold})


def made(kind, backend, pruning):
    return kind(backend=backend, pruning=pruning, max_tokens=8, temperature=0)


def joined(chunks):
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


@pytest.fixture
def full(backend, documents):
    """The answer without pruning."""
    chat = made(ChatEntroPrefill, backend, SEEDED.model_copy(update={"enabled": False}))
    return chat.invoke(QUERY, documents=documents).content


def test_a_stream_holds_a_pruned_answer_back_until_it_stands(backend, documents, full):
    chat, heard = made(ChatEntroPrefill, backend, drifting("restart_full")), Written()
    chunks = list(chat.stream(QUERY, {"callbacks": [heard]}, documents=documents))
    message = joined(chunks)
    assert message.content == full
    assert "".join(heard.tokens) == full
    told = message.response_metadata["entroprefill"]
    assert (told["outcome"], told["reason"]) == ("bypassed", "drift_restart")
    assert told["decode"]["action"] == "restarted_full"
    assert told["dropped_ids"] == []
    assert len(chunks) > 3  # the full answer comes as it is written

    async def again():
        return joined([chunk async for chunk in chat.astream(QUERY, documents=documents)])

    assert asyncio.run(again()).content == full
    assert chat.invoke(QUERY, documents=documents).content == full


def test_an_answer_that_does_not_drift_comes_at_its_end(backend, documents):
    chat = made(ChatEntroPrefill, backend, drifting("restart_full", 0.99))
    message = joined(list(chat.stream(QUERY, documents=documents)))
    expected = made(ChatEntroPrefill, backend, SEEDED).invoke(QUERY, documents=documents)
    assert message.content == expected.content
    assert message.response_metadata["entroprefill"]["outcome"] == "pruned"


def test_the_runnable_names_all_documents_after_a_restart(backend, documents, full):
    ep = made(EntroPrefillRunnable, backend, drifting("restart_full"))
    asked = {"input": QUERY, "context": documents}
    whole, streamed = ep.invoke(asked), joined(list(ep.stream(asked)))
    for output in (whole, streamed):
        assert output["answer"] == full
        assert ids(output["context"]) == output["retained_ids"] == ids(documents)
        assert output["dropped"] == []


def test_a_stop_is_a_finish_reason(backend, documents):
    chat = made(ChatEntroPrefill, backend, drifting("stop"))
    message = chat.invoke(QUERY, documents=documents)
    assert message.response_metadata["finish_reason"] == "drift"
    assert message.response_metadata["entroprefill"]["decode"]["first_above"] == 0
    assert joined(list(chat.stream(QUERY, documents=documents))).response_metadata["finish_reason"] == "drift"
