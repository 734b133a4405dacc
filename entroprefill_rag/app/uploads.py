"""Reading what a browser uploads while others ask: in turns with their questions, and no more than a few at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
from anyio import CapacityLimiter, to_thread
from numpy.typing import NDArray

from entroprefill_rag.app.loading import Loaded
from entroprefill_rag.app.visits import UploadLimits, Visit
from entroprefill_rag.errors import DocumentError
from entroprefill_rag.retrieval.embedder import Embedder

_BATCH = 8
_LOOK = 0.5
"""Seconds between two looks at whether the browser is still there."""


class UploadStoppedError(DocumentError):
    """The browser left before its file was read."""


class InTurns:
    """An embedder that a long upload shares: held for a few texts at a time, and not after who wanted it has left.

    Args:
        embedder: does the work.
        held: while it works; whoever embeds a question holds it too.
        stopped: set when nobody wants the rest.

    Attributes:
        name: of the embedder.
    """

    def __init__(self, embedder: Embedder, held: threading.Lock, stopped: threading.Event) -> None:
        self.name = embedder.name
        self._embedder, self._held, self._stopped = embedder, held, stopped

    @property
    def fingerprint(self) -> str:
        """Of the embedder."""
        return self._embedder.fingerprint

    def documents(
        self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """Vectors of passages.

        Raises:
            UploadStoppedError: nobody wants the rest.
        """
        parts = []
        for start in range(0, len(texts), _BATCH):
            if self._stopped.is_set():
                raise UploadStoppedError("the browser left before the file was read")
            with self._held:
                parts.append(self._embedder.documents(texts[start : start + _BATCH]))
            # A lock that is let go and taken at once is not handed to who waits for it.
            time.sleep(0.002)
            if progress is not None:
                progress(min(start + _BATCH, len(texts)), len(texts))
        return np.concatenate(parts) if parts else self._embedder.documents([])

    def query(self, text: str) -> NDArray[np.float32]:
        """Vector of a question; the caller holds the embedder."""
        return self._embedder.query(text)


class Uploading:
    """Uploads under way.

    Args:
        limits: bounds on one browser's.
        embedding: held while the embedder runs.
        at_once: how many are read at the same time; the others wait, and keep no thread from who answers.
        most: how many are read or wait; more are refused by who counts `under_way`.
    """

    def __init__(self, limits: UploadLimits, embedding: threading.Lock, at_once: int = 2, most: int = 8) -> None:
        self.limits = limits
        self.most = most
        self.under_way = 0
        self._embedding = embedding
        self._threads = CapacityLimiter(at_once)

    async def add(
        self, name: str, data: bytes, loaded: Loaded, visit: Visit, left: Callable[[], Awaitable[bool]]
    ) -> str:
        """Read a file into a browser's documents; returns the name it has from now on.

        Args:
            name: as the browser gives it.
            data: its bytes.
            loaded: whose embedder.
            visit: whose documents.
            left: whether the browser has gone.

        Raises:
            DocumentError: it cannot be read, is one too many, or the browser left.
        """
        stopped = threading.Event()
        shared = InTurns(loaded.embedder, self._embedding, stopped)

        def read() -> str:
            shown = visit.add(name, data, shared, self.limits, loaded.base)
            visit.uploads[shown] = replace(visit.uploads[shown], embedder=loaded.embedder)
            return shown

        self.under_way += 1
        reading = asyncio.ensure_future(to_thread.run_sync(read, limiter=self._threads))
        try:
            while not (await asyncio.wait([reading], timeout=_LOOK))[0]:
                if await left():
                    stopped.set()
            return await reading
        finally:
            stopped.set()
            self.under_way -= 1
