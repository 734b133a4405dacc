"""Model, embedder and documents, loaded in a thread of their own: the page is there before they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from entroprefill_rag.errors import EntroPrefillError

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.retrieval import FolderIndex
    from entroprefill_rag.retrieval.embedder import Embedder

Tell = Callable[[str, int, int], None]
"""Told what is being done, how many are done, of how many (0: unknown)."""


@dataclass(frozen=True)
class Loaded:
    """What answers.

    Attributes:
        backend: the model.
        embedder: of questions and uploads.
        base: the store's documents; None where the page began without any.
    """

    backend: LocalBackend
    embedder: Embedder
    base: FolderIndex | None


class NotReadyError(EntroPrefillError, RuntimeError):
    """Nothing can be asked yet, or ever: loading goes on, or has failed."""


class Loading:
    """Loads once; told of at any time.

    Args:
        load: does it, and tells how far it is.
        explain: one line for what went wrong.
    """

    def __init__(self, load: Callable[[Tell], Loaded], explain: Callable[[Exception], str]) -> None:
        self._load = load
        self._explain = explain
        self._loaded: Loaded | None = None
        self._state: Literal["loading", "ready", "failed"] = "loading"
        self._text = "starting"
        self._thread = threading.Thread(target=self._run, name="entroprefill-loading", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def status(self) -> tuple[Literal["loading", "ready", "failed"], str]:
        """How far it is, in a word and in words."""
        return self._state, self._text

    def loaded(self) -> Loaded:
        """What was loaded.

        Raises:
            NotReadyError: it is not, or cannot be.
        """
        if self._loaded is None:
            why = f"loading failed: {self._text}" if self._state == "failed" else f"still loading ({self._text})"
            raise NotReadyError(why)
        return self._loaded

    def close(self) -> None:
        """Take the hooks off the model, if it was loaded."""
        if self._loaded is not None:
            self._loaded.backend.close()

    def _run(self) -> None:
        def tell(what: str, done: int, total: int) -> None:
            self._text = f"{what}, {done:,} of {total:,}" if total else what

        try:
            self._loaded = self._load(tell)
        except Exception as error:  # shown on the page and in the terminal; there is nobody above to catch it
            self._text, self._state = self._explain(error), "failed"
        else:
            self._text, self._state = "ready", "ready"
