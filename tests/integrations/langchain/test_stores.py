"""Real documents, LangChain's splitter and stores on disk: indexed, reopened, asked."""

from pathlib import Path

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from lc_cases import SEEDED, WordHashes, ids

from entroprefill_rag.integrations.langchain import ChatEntroPrefill, EntroPrefillRunnable, LocalEmbeddings

DOCS = Path(__file__).resolve().parents[3] / "docs"
QUERY = "Who decides whether a chunk is removed?"


def pieces(size):
    """The project's own pages, cut by LangChain, with ids that stay the same."""
    splitters = pytest.importorskip("langchain_text_splitters")
    splitter = splitters.RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=0)
    found = []
    for path in sorted(DOCS.glob("*.md")):
        texts = splitter.split_text(path.read_text(encoding="utf-8"))
        found += [
            Document(id=f"{path.name}#{at}", page_content=text, metadata={"source": path.name})
            for at, text in enumerate(texts)
        ]
    return found


def in_memory(documents, embeddings, folder):
    InMemoryVectorStore.from_documents(documents, embeddings).dump(str(folder / "store.json"))
    return InMemoryVectorStore.load(str(folder / "store.json"), embeddings)


def chroma(documents, embeddings, folder):
    langchain_chroma = pytest.importorskip("langchain_chroma")
    from chromadb.config import Settings

    def opened():
        return langchain_chroma.Chroma(
            "pages",
            embedding_function=embeddings,
            persist_directory=str(folder / "chroma"),
            client_settings=Settings(anonymized_telemetry=False, is_persistent=True),
        )

    opened().add_documents(documents, ids=ids(documents))
    return opened()


@pytest.mark.parametrize("store", [in_memory, chroma])
def test_f21_ids_from_a_reopened_store_come_back_in_the_record(store, backend, tmp_path):
    documents = pieces(150)
    reopened = store(documents, WordHashes(), tmp_path)
    ep = EntroPrefillRunnable(backend=backend, pruning=SEEDED, max_tokens=4)
    retriever = reopened.as_retriever(search_kwargs={"k": 6})
    output = ({"context": retriever, "input": RunnablePassthrough()} | ep).invoke(QUERY)
    assert output["entroprefill"]["outcome"] == "pruned"
    assert output["entroprefill"]["stand_ins"] == []
    found = ids(retriever.invoke(QUERY))
    assert output["retained_ids"] == [each for each in found if each in output["retained_ids"]]
    assert set(found) == set(output["retained_ids"]) | {each["id"] for each in output["dropped"]}
    by_id = {document.id: document for document in documents}
    assert all(document.page_content == by_id[document.id].page_content for document in output["context"])
    assert all(document.metadata["source"].endswith(".md") for document in output["context"])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("store", [in_memory, chroma])
async def test_f20_the_packaged_models_answer_over_a_reopened_store(store, smollm2, embedder_folder, tmp_path):
    from lc_cases import heartbeat

    from entroprefill_rag import LocalBackend

    reopened = store(pieces(400), LocalEmbeddings(str(embedder_folder)), tmp_path)
    retriever = reopened.as_retriever(search_kwargs={"k": 6})
    with LocalBackend(*smollm2, name="smollm2-135m") as backend:
        ep = EntroPrefillRunnable(backend=backend, max_tokens=8, temperature=0)
        given = {"input": QUERY, "context": retriever.invoke(QUERY)}
        gap, output = await heartbeat(ep.ainvoke(given))
        chat = ChatEntroPrefill(backend=backend, max_tokens=8, temperature=0)
        streamed = "".join(chunk.content for chunk in chat.stream(QUERY, documents=given["context"]))
    assert output["answer"].strip()
    assert streamed.strip()
    assert output["entroprefill"]["outcome"] in ("pruned", "bypassed")
    assert len(output["context"]) + len(output["dropped"]) == 6
    # A real prefill, in torch's own threads.
    assert gap < 1.0
