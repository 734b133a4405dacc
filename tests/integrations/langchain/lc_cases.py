"""What the tests of the LangChain adapter share."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Sequence

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from tiny import LOOSE

SEEDED = LOOSE.model_copy(update={"audit": LOOSE.audit.model_copy(update={"seed": 7})})
STRICT = SEEDED.model_copy(update={"eps_row": 1e-9})
QUERY = "Which word is it, then?"


def make_documents(count=5, words=6):
    """Documents of a few dozen bytes, as the tiny model's tokens are bytes."""
    return [
        Document(id=f"d{i}", page_content=" ".join(f"word{i}{j}" for j in range(words)), metadata={"page": i})
        for i in range(count)
    ]


def ids(documents):
    return [document.id for document in documents]


def same_but_times(summary):
    return {key: value for key, value in summary.items() if key != "seconds"}


class Fixed(BaseRetriever):
    """Finds the same documents for every question."""

    found: list[Document]

    def _get_relevant_documents(self, query, *, run_manager):
        return list(self.found)


class WordHashes(Embeddings):
    """Texts with words in common lie close: a bag of hashed words, deterministic and without weights."""

    size = 256

    def embed_query(self, text: str) -> list[float]:
        vector = [0.0] * self.size
        for word in re.findall(r"[a-z]+", text.lower()):
            vector[int(hashlib.sha256(word.encode()).hexdigest(), 16) % self.size] += 1.0
        length = math.sqrt(sum(value * value for value in vector)) or 1.0
        return [value / length for value in vector]

    def embed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


class Written(BaseCallbackHandler):
    """Keeps custom events, tokens, and which runs began and ended."""

    def __init__(self):
        self.custom, self.tokens, self.open, self.ended, self.chat_params = [], [], set(), [], []

    def on_custom_event(self, name, data, *, run_id, **kwargs):
        self.custom.append((name, data))

    def on_chat_model_start(self, serialized, messages, *, run_id, **kwargs):
        self.open.add(run_id)
        self.chat_params.append(kwargs.get("invocation_params"))

    def on_chain_start(self, serialized, inputs, *, run_id, **kwargs):
        self.open.add(run_id)

    def on_llm_new_token(self, token, *, run_id, **kwargs):
        self.tokens.append(token)

    def _end(self, what, *, run_id, **kwargs):
        self.open.discard(run_id)
        self.ended.append(what)

    on_llm_end = on_llm_error = on_chain_end = on_chain_error = _end


async def heartbeat(awaitable, beat=0.005):
    """The longest time the event loop did not come round while ``awaitable`` ran, and its result."""
    gaps = []

    async def tick():
        last = time.perf_counter()
        while True:
            await asyncio.sleep(beat)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    try:
        result = await awaitable
    finally:
        ticking.cancel()
    return max(gaps), result
