"""A LangGraph agent whose tool answers from documents; the record of what was dropped is the tool's artifact.
The packaged model cannot call tools: a fixed rule stands where a tool-calling one would choose. No key, no account.
"""

import argparse
import tempfile
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from entroprefill_rag.documents import read_folder, split
from entroprefill_rag.integrations.langchain import EntroPrefillRunnable, LocalEmbeddings
from entroprefill_rag.report.plain import plain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("question", nargs="?", default="What is the notice period of the lease?")
parser.add_argument("--docs", default=str(Path(__file__).parent / "documents"), help="folder of documents")
parser.add_argument("--store", type=Path, help="file that keeps the store between calls; default: a temporary one")
parser.add_argument("--model", help="hub id, folder or GGUF file; default: ENTROPREFILL_MODEL, else the packaged one")
args = parser.parse_args()
reader = EntroPrefillRunnable(model=args.model, max_tokens=48, temperature=0, title_key="title")


@tool(response_format="content_and_artifact")
def ask_documents(question: str) -> tuple[str, dict]:
    """Answer a question from the documents."""
    output = reader.invoke({"input": question, "context": store.similarity_search(question, k=6)})
    return output["answer"], output["entroprefill"]


def agent(state: MessagesState) -> dict:
    call = {"name": "ask_documents", "args": {"question": state["messages"][-1].content}, "id": "1"}
    return {"messages": [AIMessage("", tool_calls=[call])]}


graph = StateGraph(MessagesState).add_sequence([agent, ("tools", ToolNode([ask_documents]))]).add_edge(START, "agent")

with tempfile.TemporaryDirectory() as temporary:
    file = args.store or Path(temporary) / "store.json"
    if not file.exists():
        chunks = [chunk for document in read_folder(args.docs).documents for chunk in split(document)]
        documents = [Document(chunk.text, id=chunk.id, metadata={"title": chunk.title}) for chunk in chunks]
        InMemoryVectorStore.from_documents(documents, LocalEmbeddings()).dump(str(file))
    store = InMemoryVectorStore.load(str(file), LocalEmbeddings())
for message, _ in graph.compile().stream({"messages": [("user", args.question)]}, stream_mode="messages"):
    if isinstance(message, AIMessageChunk):
        print(plain(message.text), end="", flush=True)
    elif isinstance(message, ToolMessage):
        audit = message.artifact
print(f"\n\nModel: {audit['model']}. {audit['outcome'].capitalize()}: {audit['message']}")
print("Kept:", *map(plain, audit["retained_ids"]), "\nDropped:", *map(plain, audit["dropped_ids"]))
for strength in ("exact", "probabilistic", "conditional"):
    if audit["claims"][strength]:
        print(f"\n{strength.capitalize()}: {plain(audit['claims'][strength])}")
