"""What orders chunks without the language model: chance, retrieval's order, a bi-encoder, a cross-encoder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.bench.questions import Question
from entroprefill_rag.errors import ModelSourceError
from entroprefill_rag.request import Chunk

if TYPE_CHECKING:
    from entroprefill_rag.retrieval.embedder import Embedder

Floats = NDArray[np.float64]


class Ranker(Protocol):
    """Orders the chunks of a question."""

    def scores(self, question: Question) -> Floats:
        """``[k]``, high = kept."""


def seed_of(*parts: object) -> int:
    """53 bits that depend on the parts alone."""
    told = "\x1f".join(map(str, parts)).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(told).digest()[:8], "big") >> 11


def shown(chunk: Chunk) -> str:
    """A chunk as other models are shown it: title and text."""
    return f"{chunk.title}\n{chunk.text}" if chunk.title else chunk.text


class AtRandom:
    """A random order, another one for each question, the same in each run.

    Args:
        seed: of the whole run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def scores(self, question: Question) -> Floats:
        """``[k]``."""
        draw = np.random.default_rng(seed_of(self._seed, "random chunks", question.set, question.id))
        return draw.random(len(question.chunks))


class InOrder:
    """The order of retrieval: the first is the best."""

    def scores(self, question: Question) -> Floats:
        """``[k]``."""
        return -np.arange(len(question.chunks), dtype=np.float64)


class BySimilarity:
    """Cosine similarity to the question.

    Args:
        embedder: of chunks and question.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    def scores(self, question: Question) -> Floats:
        """``[k]``."""
        chunks = self._embedder.documents([shown(chunk) for chunk in question.chunks])
        return np.asarray(chunks @ self._embedder.query(question.text), dtype=np.float64)


class ByCrossEncoder:
    """A cross-encoder of sentence-transformers.

    Args:
        name: hub id or folder.
        device: where it runs; None takes an accelerator if there is one.

    Raises:
        ModelSourceError: it cannot be loaded.
    """

    def __init__(self, name: str, *, device: str | None = None) -> None:
        if name.startswith((".", "~", "/")) and not Path(name).expanduser().is_dir():
            raise ModelSourceError(f"there is no folder {name!r} to load the cross-encoder from")
        try:
            from sentence_transformers import CrossEncoder

            # Pickled weights can run code; a model that comes as one is refused.
            self._model: Any = CrossEncoder(
                str(Path(name).expanduser()), device=device, model_kwargs={"use_safetensors": True}
            )
        except ModuleNotFoundError as error:
            raise ModelSourceError(
                f"a cross-encoder needs {error.name}; run: pip install -e '.[bench]' in a clone"
            ) from error
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelSourceError(
                f"the cross-encoder {name!r} cannot be loaded: {first} (folder or hub id)"
            ) from error

    def scores(self, question: Question) -> Floats:
        """``[k]``."""
        pairs = [(question.text, shown(chunk)) for chunk in question.chunks]
        told = np.asarray(self._model.predict(pairs, show_progress_bar=False), dtype=np.float64)
        if told.shape != (len(pairs),):
            raise ModelSourceError(f"a cross-encoder gives one score for a pair, this one gave {told.shape}")
        return told
