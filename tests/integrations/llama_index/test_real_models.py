"""With the packaged embedder and SmolLM2, over the project's own pages, from stores that were closed and reopened."""

from pathlib import Path

import pytest
from llama_cases import ids
from llama_index.core import SimpleDirectoryReader, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.node_parser import TokenTextSplitter

from entroprefill_rag import LocalBackend
from entroprefill_rag.integrations.llama_index import EntroPrefillPostprocessor, LocalEmbedding, get_audit

pytestmark = [pytest.mark.slow, pytest.mark.model]

DOCS = Path(__file__).resolve().parents[3] / "docs"
QUESTION = "What is a head's cap on discarded mass?"


def simple(nodes, embed, folder):
    VectorStoreIndex(nodes, embed_model=embed).storage_context.persist(str(folder))
    return load_index_from_storage(StorageContext.from_defaults(persist_dir=str(folder)), embed_model=embed)


def chroma(nodes, embed, folder):
    chromadb = pytest.importorskip("chromadb")
    stores = pytest.importorskip("llama_index.vector_stores.chroma")

    def opened():
        client = chromadb.PersistentClient(str(folder), chromadb.Settings(anonymized_telemetry=False))
        return stores.ChromaVectorStore(client.get_or_create_collection("pages", embedding_function=None))

    VectorStoreIndex(nodes, storage_context=StorageContext.from_defaults(vector_store=opened()), embed_model=embed)
    return VectorStoreIndex.from_vector_store(opened(), embed_model=embed)


@pytest.mark.parametrize("store", [simple, chroma])
def test_f02_real_documents_in_a_reopened_store_are_answered_in_one_pass(store, smollm2, embedder_folder, tmp_path):
    pages = SimpleDirectoryReader(str(DOCS), required_exts=[".md"], filename_as_id=True).load_data()
    for page in pages:
        page.excluded_llm_metadata_keys = [key for key in page.metadata if key != "file_name"]
    nodes = TokenTextSplitter(chunk_size=160, chunk_overlap=0).get_nodes_from_documents(pages)
    assert len(nodes) > 8
    index = store(nodes, LocalEmbedding(), tmp_path)
    with LocalBackend(*smollm2, name="smollm2-135m") as backend:
        pp = EntroPrefillPostprocessor(backend=backend)
        engine = index.as_query_engine(
            node_postprocessors=[pp], response_synthesizer=pp.synthesizer(max_new_tokens=8), similarity_top_k=6
        )
        response = engine.query(QUESTION)
        record = get_audit(response)
        brief = response.metadata["entroprefill"]
    assert response.response
    assert brief["handoff"]["taken"]
    assert len(record.prompt.chunks) == 6
    assert set(record.retained_ids) | set(record.dropped_ids) == {chunk.id for chunk in record.prompt.chunks}
    assert tuple(ids(response.source_nodes)) == record.retained_ids
    assert all(node.metadata["file_name"].endswith(".md") for node in response.source_nodes)
    assert len(str(brief)) < 8000
