"""What is kept of a folder between calls: vectors by the hash of a chunk, texts by the hash of a file.

One folder in the cache for each (folder of documents, embedder, split settings), mode 0700, files 0600, no pickle.
It is a cache: whatever is damaged is made again, and a disk that cannot be written only costs time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.cache import cache_dir, private_dir
from entroprefill_rag.documents.readers import Extract

Vectors = Mapping[str, NDArray[np.float32]]
_FORMAT = "1"
_HASH = 64


@dataclass
class IndexStore:
    """The kept files of one index; also the :class:`~entroprefill_rag.documents.TextCache` of its documents.

    Attributes:
        folder: where they lie; None keeps nothing.
        notes: what went wrong with the cache, for people.
    """

    folder: Path | None
    notes: list[str] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, documents: Path, fingerprint: str, settings: str) -> IndexStore:
        """The store of a folder of documents under an embedder and split settings."""
        told = "\0".join((_FORMAT, os.fspath(documents.resolve()), fingerprint, settings))
        return cls(indexes_dir() / hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:24])

    def load(self) -> Vectors:
        """Kept vectors by chunk hash; nothing where there are none or they are damaged."""
        if self.folder is None or not (file := self.folder / "vectors.npz").is_file():
            return {}
        try:
            with np.load(file, allow_pickle=False) as kept:
                hashes, vectors = kept["hashes"], kept["vectors"]
            if hashes.dtype != np.dtype(f"S{_HASH}") or vectors.dtype != np.float32 or vectors.ndim != 2:
                raise ValueError("not the arrays expected")
            if len(hashes) != len(vectors) or not np.isfinite(vectors).all():
                raise ValueError("not the numbers expected")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, MemoryError):
            self.notes.append("the kept index was damaged and was made anew")
            return {}
        return {name.decode("ascii", "replace"): row for name, row in zip(hashes.tolist(), vectors, strict=True)}

    def save(self, hashes: Sequence[str], vectors: NDArray[np.float32], about: Mapping[str, object]) -> None:
        """Keep vectors ``[N, d]`` of chunks with these hashes, and what the index is about, for ``cache info``."""
        if self.folder is None:
            return
        try:
            private_dir(self.folder)
            with _replacing(self.folder / "vectors.npz") as file, file.open("wb") as stream:
                np.savez(stream, hashes=np.array(hashes, dtype=f"S{_HASH}"), vectors=vectors)
            with _replacing(self.folder / "about.json") as file:
                file.write_text(json.dumps(dict(about)), encoding="utf-8")
        except OSError as error:
            self.notes.append(f"the index could not be kept ({error.strerror or type(error).__name__})")

    def get(self, key: str) -> Extract | None:
        """The kept text of a file, by the hash of its contents."""
        self._used.add(key)
        if self.folder is None:
            return None
        try:
            kept = json.loads((self.folder / "texts" / f"{key}.json").read_text(encoding="utf-8"))
            headings = tuple((int(offset), str(title)) for offset, title in kept["headings"])
            return Extract(str(kept["text"]), headings, tuple(map(str, kept["notes"])))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self.notes.append("a kept text was damaged; its file was read again")
            return None

    def put(self, key: str, value: Extract) -> None:
        """Keep the text of a file."""
        if self.folder is None:
            return
        try:
            private_dir(self.folder)
            texts = private_dir(self.folder / "texts")
            with _replacing(texts / f"{key}.json") as file:
                file.write_text(json.dumps(asdict(value)), encoding="utf-8")
        except OSError as error:
            self.notes.append(f"a text could not be kept ({error.strerror or type(error).__name__})")

    def forget_unused(self) -> None:
        """Remove kept texts of files that are no longer in the folder."""
        if self.folder is not None:
            for file in (self.folder / "texts").glob("*.json"):
                if file.stem not in self._used:
                    file.unlink(missing_ok=True)


@dataclass(frozen=True)
class KeptIndex:
    """One line of ``cache info``."""

    documents: str
    embedder: str
    chunks: int
    size: int


def indexes_dir() -> Path:
    """Where all indexes lie."""
    return cache_dir() / "indexes"


def kept_indexes() -> list[KeptIndex]:
    """The indexes in the cache, largest first."""
    found = []
    for folder in _folders(indexes_dir()):
        try:
            about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
            told = str(about["documents"]), str(about["embedder"]), int(about["chunks"])
        except (OSError, ValueError, KeyError, TypeError):
            told = "(unfinished or damaged)", "", 0
        found.append(KeptIndex(*told, size=_size(folder)))
    return sorted(found, key=lambda one: -one.size)


def clear_indexes() -> int:
    """Remove all indexes; returns the bytes freed."""
    freed = _size(indexes_dir())
    shutil.rmtree(indexes_dir(), ignore_errors=True)
    return freed - _size(indexes_dir())


def _folders(parent: Path) -> list[Path]:
    return sorted(one for one in parent.iterdir() if one.is_dir()) if parent.is_dir() else []


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary file (mode 0600) that takes the target's place, in one step, when the block ends well."""
    handle, name = tempfile.mkstemp(prefix=".partial-", dir=target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
