"""What a conversation is tested on: a tiny model that prunes, and a handful of documents."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "engine")]


@pytest.fixture
def docs(tmp_path):
    from letters import write_documents

    return write_documents(tmp_path / "docs")


@pytest.fixture(scope="session")
def backend():
    import tiny

    from entroprefill_rag import LocalBackend

    with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny") as made:
        yield made


@pytest.fixture
def session(backend, docs):
    import tiny
    from letters import LetterEmbedder

    from entroprefill_rag.chat.session import ChatSession
    from entroprefill_rag.retrieval import FolderIndex

    index = FolderIndex.open(docs, LetterEmbedder(), cache=False)
    return ChatSession(backend, index, tiny.LOOSE, max_new_tokens=6)
