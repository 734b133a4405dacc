"""A folder of documents: what is in it, what is read of it, and what is left out and why."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from entroprefill_rag.documents.kinds import MAIN_SUFFIXES, Kind, kind_of
from entroprefill_rag.documents.readers import Extract, Limits, Unreadable, extract
from entroprefill_rag.errors import DocumentError

_SLOW_KINDS: frozenset[Kind] = frozenset({"pdf", "docx", "html"})
_MACHINE_FOLDERS = frozenset({"__pycache__", "node_modules", "__MACOSX"})


@dataclass(frozen=True)
class Document:
    """The text of one file.

    Attributes:
        path: path relative to the folder, with ``/``; what is not UTF-8 in it is written as ``\\xNN``.
        text: its text, see :class:`~entroprefill_rag.documents.readers.Extract`.
        kind: what it was read as.
        headings: ``(offset, title)``, ascending.
        notes: what was changed or left out while reading.
    """

    path: str
    text: str = field(repr=False)
    kind: Kind
    headings: tuple[tuple[int, str], ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A file or folder that was not read, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Reading:
    """What reading a folder gave: documents and skipped files, each sorted by path."""

    documents: list[Document]
    skipped: list[Skipped]


class TextCache(Protocol):
    """Keeps the text of files that are slow to read; keys are hashes of a file's contents and kind."""

    def get(self, key: str) -> Extract | None:
        """The text kept under a key."""

    def put(self, key: str, value: Extract) -> None:
        """Keep a text."""


def read_folder(path: str | Path, limits: Limits | None = None, texts: TextCache | None = None) -> Reading:
    """Read the documents of a folder, or one file.

    Hidden files and folders, symbolic links and files of unknown kinds are skipped; links are never followed, so
    nothing outside the folder is read. The path given may itself be hidden or a link: somebody typed it.

    Args:
        path: a folder, or one file.
        limits: bounds on what is read.
        texts: where the text of PDF, DOCX and HTML files may be kept between calls.

    Raises:
        DocumentError: the path does not exist, or nothing in it could be read; the message says what was seen.
    """
    limits = limits or Limits()
    root = Path(path)
    if not root.exists():
        raise DocumentError(f"{str(path)!r} does not exist; give a folder or a file of documents")
    documents: list[Document] = []
    skipped: list[Skipped] = []
    single = not root.is_dir()
    left = limits.max_total_bytes
    for name, file in [(root.name, root.resolve())] if single else _walk(root, limits, skipped):
        shown = _shown(name)
        try:
            kind = kind_of(file)
            if kind is None:
                raise Unreadable(f"not a kind that is read ({file.suffix.lower() or 'no suffix'})")
            data = _read(file, limits.max_file_bytes, left)
            left -= len(data)
            result = _extract(data, kind, limits, texts)
        except Unreadable as error:
            skipped.append(Skipped(shown, str(error)))
        except OSError as error:
            skipped.append(Skipped(shown, f"cannot be opened ({error.strerror or type(error).__name__})"))
        else:
            documents.append(Document(shown, result.text, kind, result.headings, result.notes))
    if not documents:
        raise DocumentError(_nothing_read(str(path), skipped))
    return Reading(sorted(documents, key=lambda one: one.path), sorted(skipped, key=lambda one: one.path))


def _walk(root: Path, limits: Limits, skipped: list[Skipped]) -> Iterator[tuple[str, Path]]:
    """Relative names and paths of the regular-looking files below a folder; the rest goes into ``skipped``."""
    seen = 0
    inside = root.resolve()

    def refused(error: OSError) -> None:
        name = os.path.relpath(error.filename or root, root)
        skipped.append(Skipped(_shown(name), f"cannot be opened ({error.strerror})"))

    for folder, folders, files in os.walk(root, onerror=refused):
        below = sorted(folders)
        folders.clear()
        for name in [*below, *sorted(files)]:
            file = Path(folder, name)
            relative = file.relative_to(root).as_posix()
            if name.startswith("."):
                skipped.append(Skipped(_shown(relative), "hidden"))
            elif file.is_symlink():
                target = Path(os.path.realpath(file))
                where = "in" if target.is_relative_to(inside) else "out of"
                skipped.append(Skipped(_shown(relative), f"a symbolic link {where} the folder"))
            elif name in below:
                if name in _MACHINE_FOLDERS:
                    skipped.append(Skipped(_shown(relative), "a folder of machine-made files"))
                else:
                    folders.append(name)
            elif seen >= limits.max_files:
                skipped.append(Skipped(_shown(relative), f"more than {limits.max_files} files; the rest was not read"))
                return
            else:
                seen += 1
                yield relative, file


def _read(file: Path, most: int, left: int) -> bytes:
    """A regular file's bytes; never blocks on a pipe, never follows a link put there meanwhile."""
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as stream:
        info = os.fstat(stream.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise Unreadable("not a regular file")
        if info.st_size > most:
            raise Unreadable(f"{info.st_size} bytes, more than the limit of {most} for one file")
        if info.st_size > left:
            raise Unreadable("over the limit for all files together")
        return stream.read(most)


def _extract(data: bytes, kind: Kind, limits: Limits, texts: TextCache | None) -> Extract:
    if texts is None or kind not in _SLOW_KINDS:
        return extract(data, kind, limits)
    key = hashlib.sha256(f"{kind} {limits} ".encode() + data).hexdigest()
    found = texts.get(key)
    if found is None:
        found = extract(data, kind, limits)
        texts.put(key, found)
    return found


def _shown(name: str) -> str:
    """A name that can be printed, hashed and put into JSON, and that still differs from every other name."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _nothing_read(path: str, skipped: list[Skipped]) -> str:
    reasons = Counter(one.reason for one in skipped).most_common(5)
    seen = "; ".join(f"{count} x {reason}" for reason, count in reasons) or "it is empty"
    return f"no readable document in {path!r} ({seen}); readable are {MAIN_SUFFIXES} and source code"
