"""Who is at the page: each browser has its own uploads and answers, which nobody else sees, in memory only."""

from __future__ import annotations

import re
import secrets
import tempfile
import threading
import time
import unicodedata
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from entroprefill_rag.chat.session import Exchange
from entroprefill_rag.documents import Limits
from entroprefill_rag.documents.kinds import MAIN_SUFFIXES, kind_of
from entroprefill_rag.errors import DocumentError, RequestError
from entroprefill_rag.report.plain import one_line
from entroprefill_rag.retrieval import FolderIndex
from entroprefill_rag.retrieval.embedder import Embedder

UPLOADS = "uploads"
_KEPT_ANSWERS = 20
_LONGEST_NAME = 100
_LOOKED_AT = 1000
_NOT_IN_NAMES = re.compile(r"[^\w .()+,=@-]+")


@dataclass(frozen=True)
class UploadLimits:
    """Bounds on what one browser may upload.

    Attributes:
        file_bytes: size of one file.
        files: how many files.
        characters: text of one file; the rest is left out and said.
        chunks: of all files together.
        seconds: for the pages of one .pdf, or for one .docx.
        unpacked: bytes that one .docx may unpack to: what a parser makes of them takes forty times as much memory.
    """

    file_bytes: int = 5_000_000
    files: int = 20
    characters: int = 400_000
    chunks: int = 2_000
    seconds: float = 20.0
    unpacked: int = 10_000_000


@dataclass
class Visit:
    """One browser's uploads and answers.

    Attributes:
        uploads: by name, each with its own small index.
        answers: the last exchanges by a name that cannot be guessed.
    """

    uploads: dict[str, FolderIndex] = field(default_factory=dict)
    answers: OrderedDict[str, Exchange] = field(default_factory=OrderedDict)
    used: float = field(default_factory=time.monotonic)
    _adding: threading.Lock = field(default_factory=threading.Lock)

    def index(self, base: FolderIndex | None) -> FolderIndex:
        """The store's documents and this browser's own.

        Raises:
            RequestError: there is neither.
        """
        parts = [*([base] if base is not None else []), *self.uploads.values()]
        if not parts:
            raise RequestError("there are no documents yet; upload one below (or start with --docs PATH)")
        return FolderIndex.joined(parts)

    def add(
        self, name: str, data: bytes, embedder: Embedder, limits: UploadLimits, base: FolderIndex | None = None
    ) -> str:
        """Read, split and embed a file; returns the name it has from now on. It is on disk only while it is read.

        Args:
            name: as the browser gives it.
            data: its bytes.
            embedder: of the store.
            limits: bounds on uploads.
            base: the store's documents, whose paths are taken.

        Raises:
            DocumentError: it cannot be read, or is one too many.
        """
        shown = safe_name(name)
        with self._adding:
            shown = self._free(shown, base)
            if len(self.uploads) >= limits.files:
                raise DocumentError(f"{limits.files} files are uploaded already; remove one first")
            left = limits.chunks - sum(len(one.chunks) for one in self.uploads.values())
            self.uploads[shown] = _read(shown, data, embedder, limits, max(left, 0))
        return shown

    def remember(self, exchange: Exchange) -> str:
        """Keep an exchange for its record and its comparison; the oldest goes."""
        name = secrets.token_urlsafe(12)
        self.answers[name] = exchange
        while len(self.answers) > _KEPT_ANSWERS:
            self.answers.popitem(last=False)
        return name

    def _free(self, name: str, base: FolderIndex | None) -> str:
        paths = {document.path for document in base.reading.documents} if base is not None else set()
        path, number = PurePath(name), 2
        while name in self.uploads or f"{UPLOADS}/{name}" in paths:
            name, number = f"{path.stem} ({number}){path.suffix}", number + 1
        return name


class Visits:
    """The browsers that were here last.

    Args:
        most: how many are remembered; the one that was away longest is forgotten.
        idle: seconds after which a browser that does nothing is forgotten.
    """

    def __init__(self, most: int = 32, idle: float = 4 * 3600.0) -> None:
        self._most = most
        self._idle = idle
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self) -> tuple[str, Visit]:
        """A new visit, and the secret by which its browser comes again; one that left nothing here goes first."""
        secret, visit = secrets.token_urlsafe(32), Visit()
        with self._lock:
            self._visits[secret] = visit
            while len(self._visits) > self._most:
                others = ((name, one) for name, one in self._visits.items() if name != secret)
                gone = next((name for name, one in others if not one.uploads and not one.answers), None)
                self._visits.pop(next(iter(self._visits)) if gone is None else gone)
        return secret, visit

    def find(self, secret: str) -> Visit | None:
        """The visit of a secret, if it is still remembered."""
        now = time.monotonic()
        with self._lock:
            for name in [name for name, visit in self._visits.items() if now - visit.used > self._idle]:
                del self._visits[name]
            visit = self._visits.get(secret)
            if visit is not None:
                visit.used = now
                self._visits.move_to_end(secret)
        return visit


def safe_name(name: str) -> str:
    """What is left of a stranger's file name: its last part, letters, digits and a few marks, at most 100 bytes.

    Raises:
        DocumentError: not the name of a kind of file that is read.
    """
    given = re.split(r"[/\\]", name)[-1].encode("utf-8", "replace").decode()[-_LOOKED_AT:]
    last = one_line(unicodedata.normalize("NFC", given), 2 * _LOOKED_AT)
    path = PurePath(" ".join(_NOT_IN_NAMES.sub("_", last).split()).strip(". ") or "document")
    if kind_of(path) is None:
        raise DocumentError(
            f"{one_line(last, 60)!r} is not a kind of file that is read; readable are {MAIN_SUFFIXES} and source code"
        )
    room = _LONGEST_NAME - len(path.suffix.encode())
    return path.stem.encode()[:room].decode(errors="ignore") + path.suffix


def _read(name: str, data: bytes, embedder: Embedder, limits: UploadLimits, chunks: int) -> FolderIndex:
    bounds = Limits(
        max_files=1,
        max_characters=limits.characters,
        max_pdf_seconds=limits.seconds,
        max_docx_seconds=limits.seconds,
        max_docx_bytes=limits.unpacked,
        max_chunks=chunks,
    )
    with tempfile.TemporaryDirectory(prefix="entroprefill-") as folder:  # mode 0700
        place = Path(folder, UPLOADS)
        place.mkdir()
        (place / name).write_bytes(data)
        try:
            return FolderIndex.open(folder, embedder, cache=False, limits=bounds)
        except DocumentError as error:
            # The folder's name says nothing to anybody; the reason does.
            raise DocumentError(f"{name} cannot be read: {str(error).replace(folder, 'the upload')}") from error
