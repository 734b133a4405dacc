"""A tiny backend, and documents in a retriever."""

from __future__ import annotations

import gc
import os

import pytest

pytest.importorskip("langchain_core")
os.environ["ANONYMIZED_TELEMETRY"] = "False"
os.environ["LANGSMITH_TRACING"] = "false"

from lc_cases import SEEDED, Fixed, make_documents
from tiny import model, tokenizer

from entroprefill_rag import LocalBackend
from entroprefill_rag.integrations.langchain import (
    ChatEntroPrefill,
    EntroPrefillCompressor,
    EntroPrefillRunnable,
    set_default_backend,
)


@pytest.fixture(autouse=True)
def nothing_global():
    yield
    set_default_backend(None)


@pytest.fixture
def backend():
    with LocalBackend(model(), tokenizer(), name="tiny") as made:
        yield made
    gc.collect()


@pytest.fixture
def documents():
    return make_documents()


@pytest.fixture
def retriever(documents):
    return Fixed(found=documents)


@pytest.fixture
def ep(backend):
    return EntroPrefillRunnable(backend=backend, pruning=SEEDED, max_tokens=8, temperature=0)


@pytest.fixture
def chat(backend):
    return ChatEntroPrefill(backend=backend, pruning=SEEDED, max_tokens=8, temperature=0)


@pytest.fixture
def compressor(backend):
    return EntroPrefillCompressor(backend=backend, pruning=SEEDED)
