"""In a graph: tokens as they come, state that can be stored, and a tool for an agent."""

import logging
import warnings
from typing import Any, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from lc_cases import QUERY, ids

pytest.importorskip("langgraph")

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

from entroprefill_rag.integrations.langchain import EntroPrefillRunnable, get_audit

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class State(TypedDict, total=False):
    input: str
    context: list[Document]
    answer: str
    retained_ids: list[str]
    dropped: list[dict[str, Any]]
    entroprefill: dict[str, Any]
    usage_metadata: dict[str, Any]
    entroprefill_record: dict[str, Any]


def graph_of(node, state, **compile_with):
    graph = StateGraph(state)
    graph.add_node("answer", node)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile(**compile_with)


def test_f24_state_comes_back_from_a_checkpointer_without_a_warning(ep, compressor, documents, caplog):
    full = EntroPrefillRunnable(backend=ep.source, pruning=ep.pruning, max_tokens=4, include_record="full")

    def both(state):
        return full.invoke({**state, "context": compressor.compress_documents(state["context"], QUERY)})

    for node in (full, both):
        graph = graph_of(node, State, checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1"}}
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
            warnings.simplefilter("error")
            output = graph.invoke({"input": QUERY, "context": documents}, config)
            stored = graph.get_state(config).values
        assert stored == output
        assert type(stored["context"][0]) is Document
        assert get_audit(stored).prompt.hash == stored["entroprefill"]["prompt_hash"]
        assert not [record for record in caplog.records if "nregistered" in record.getMessage()]


async def test_f23_tokens_come_in_stream_mode_messages(ep, chat, documents):
    def ask(state: MessagesState):
        return {"messages": [chat.invoke(state["messages"], documents=documents)]}

    graph = graph_of(ask, MessagesState)
    messages = [message for message, _ in graph.stream({"messages": [HumanMessage(QUERY)]}, stream_mode="messages")]
    texts = [message.content for message in messages if message.content]
    assert len(texts) > 2
    assert sum("entroprefill" in message.response_metadata for message in messages) == 1
    assert "".join(texts) == chat.invoke(QUERY, documents=documents).content
    whole = graph_of(ep, State)
    given = {"input": QUERY, "context": documents}
    pieces = [each async for each, _ in whole.astream(given, stream_mode="messages")]
    assert "".join(piece.content for piece in pieces) == ep.invoke(given)["answer"]


def test_f24_a_conversation_goes_on_from_its_checkpoint(chat, documents):
    def ask(state: MessagesState):
        return {"messages": [chat.invoke(state["messages"], documents=documents)]}

    graph = graph_of(ask, MessagesState, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    graph.invoke({"messages": [HumanMessage(QUERY)]}, config)
    after = graph.invoke({"messages": [HumanMessage("And then?")]}, config)["messages"]
    assert [type(message) for message in after] == [HumanMessage, AIMessage] * 2
    assert after[3].usage_metadata["input_tokens"] > after[1].usage_metadata["input_tokens"]


def test_f24_an_agent_uses_it_as_a_tool_with_an_artifact(ep, retriever):
    agents = pytest.importorskip("langchain.agents")
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel

    @tool(response_format="content_and_artifact")
    def look_up(question: str) -> tuple[str, dict[str, Any]]:
        """Answer a question from the documents."""
        output = ep.invoke({"input": question, "context": retriever.invoke(question)})
        return output["answer"], {"documents": output["context"], "audit": output["entroprefill"]}

    class Scripted(GenericFakeChatModel):
        def bind_tools(self, tools, **kwargs):
            return self

    call = {"name": "look_up", "args": {"question": QUERY}, "id": "1"}
    agent = agents.create_agent(
        Scripted(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("done")])),
        [look_up],
        checkpointer=InMemorySaver(),
    )
    messages = agent.invoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": "1"}})["messages"]
    result = next(message for message in messages if message.type == "tool")
    assert result.content == ep.invoke({"input": QUERY, "context": retriever.found})["answer"]
    assert result.artifact["audit"]["outcome"] == "pruned"
    assert ids(result.artifact["documents"]) == result.artifact["audit"]["retained_ids"]


def test_f24_a_state_takes_the_keys_it_has(ep, documents):
    class Small(TypedDict, total=False):
        input: str
        context: list[Document]
        answer: str

    output = graph_of(ep, Small).invoke({"input": QUERY, "context": documents})
    assert set(output) == {"input", "context", "answer"}
    assert len(output["context"]) < len(documents)
