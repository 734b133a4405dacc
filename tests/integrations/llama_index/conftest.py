"""A tiny backend, indexes over the project's own documents, and handlers that write down events."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

pytest.importorskip("llama_index.core")
os.environ.setdefault("ANONYMIZED_TELEMETRY", "False")

from llama_cases import Written, make_nodes
from llama_index.core import MockEmbedding, Settings, SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.node_parser import TokenTextSplitter
from tiny import model, tokenizer

from entroprefill_rag import LocalBackend
from entroprefill_rag.integrations.llama_index import set_default_backend

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def nothing_global(monkeypatch):
    """No key, and no default LLM, callbacks or backend left by a test."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    before = (Settings._llm, Settings._callback_manager)
    Settings._llm = Settings._callback_manager = None
    yield
    Settings._llm, Settings._callback_manager = before
    set_default_backend(None)


@pytest.fixture
def backend():
    with LocalBackend(model(), tokenizer(), name="tiny") as made:
        yield made
    gc.collect()


@pytest.fixture
def written():
    handler = Written(events=[])
    root = get_dispatcher()
    root.event_handlers.append(handler)
    yield handler
    root.event_handlers.remove(handler)


@pytest.fixture
def nodes():
    return make_nodes()


@pytest.fixture(scope="session")
def documents():
    """The project's own pages, read and split with LlamaIndex; short pieces, as the tiny model counts bytes."""
    pages = SimpleDirectoryReader(str(ROOT / "docs"), required_exts=[".md"]).load_data()
    for page in pages:
        page.excluded_llm_metadata_keys = page.excluded_embed_metadata_keys = sorted(page.metadata)
    return TokenTextSplitter(chunk_size=48, chunk_overlap=0).get_nodes_from_documents(pages)[:40]


@pytest.fixture
def index(documents):
    return VectorStoreIndex(documents, embed_model=MockEmbedding(embed_dim=8))
