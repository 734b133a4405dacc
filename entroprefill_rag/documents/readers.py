"""From the bytes of one file to its text and headings, one function a kind.

Bytes come from strangers: a reader either returns text or raises :class:`Unreadable` with a reason for people.
Readers that need a package import it on first use.
"""

from __future__ import annotations

import csv
import io
import re
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from entroprefill_rag.documents.headings import markdown_headings, rst_headings
from entroprefill_rag.documents.html import html_to_markdown
from entroprefill_rag.documents.kinds import Kind

_INSTALL = "pip install -e '.[cli]' in a clone"
_BOMS = (
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_TOO_MANY_REPLACED = 0.1
_SURROGATE = re.compile("[\ud800-\udfff]")


class Unreadable(Exception):
    """A file that gives no text; the message is the reason, without any of the file's contents."""


@dataclass(frozen=True)
class Limits:
    """Bounds on what is read, so that no file or folder can exhaust the machine.

    Attributes:
        max_files: files looked at, whatever their kind.
        max_file_bytes: size of one file on disk.
        max_total_bytes: size of all files read.
        max_docx_bytes: unpacked size of one .docx.
        max_docx_seconds: time after which the rest of a .docx is left out and noted.
        max_pdf_pages: pages read of one .pdf; the rest is left out and noted.
        max_pdf_seconds: time after which the remaining pages of a .pdf are left out and noted.
        max_characters: length of one document's text; the rest is left out and noted.
        max_chunks: chunks of all documents together; more are refused before any is embedded.
    """

    max_files: int = 20_000
    max_file_bytes: int = 20_000_000
    max_total_bytes: int = 500_000_000
    max_docx_bytes: int = 100_000_000
    max_docx_seconds: float = 60.0
    max_pdf_pages: int = 2_000
    max_pdf_seconds: float = 60.0
    max_characters: int = 5_000_000
    max_chunks: int = 1_000_000


@dataclass(frozen=True)
class Extract:
    """What a reader gives back.

    Attributes:
        text: the text, free of NUL bytes, lone surrogates and carriage returns.
        headings: ``(offset, title)``, ascending: which title holds from which character on.
        notes: what was changed or left out on the way.
    """

    text: str
    headings: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()


def extract(data: bytes, kind: Kind, limits: Limits) -> Extract:
    """Read one file's bytes.

    Raises:
        Unreadable: the bytes give no text; the message says why.
    """
    try:
        return _READERS[kind](data, limits)
    except ModuleNotFoundError as error:
        package = (error.name or "a package").split(".")[0]
        raise Unreadable(f"reading {kind} needs {package}, which is not installed ({_INSTALL})") from error


def decode(data: bytes) -> tuple[str, list[str]]:
    """Bytes to text: a byte-order mark decides, else UTF-8, else UTF-8 with replacements, which is noted."""
    notes = []
    encoding = next((name for bom, name in _BOMS if data.startswith(bom)), "utf-8")
    if encoding in ("utf-8", "utf-8-sig") and b"\x00" in data:
        raise Unreadable("binary (it contains NUL bytes)")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = data.decode(encoding, errors="replace")
        replaced = text.count("\ufffd")
        if replaced > _TOO_MANY_REPLACED * len(text):
            raise Unreadable(
                f"not text in UTF-8 or UTF-16 ({replaced} of {len(text)} characters are undecodable); convert it first"
            ) from None
        notes.append(f"{replaced} undecodable byte sequences were replaced (not valid {encoding.upper()})")
    return text, notes


def _clean(text: str, notes: list[str]) -> str:
    """Normalise line ends, and mend what no tokenizer or JSON writer takes."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n\n").replace("\x00", "")
    if _SURROGATE.search(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        notes.append("lone surrogates were replaced")
    return text


def _finish(text: str, notes: list[str], limits: Limits) -> str:
    """Clean a text, cut what is too long, refuse what is empty."""
    text = _clean(text, notes)
    if len(text) > limits.max_characters:
        text = text[: limits.max_characters]
        notes.append(f"cut after {limits.max_characters} characters")
    if not text.strip():
        raise Unreadable("empty")
    return text


def _text(data: bytes, limits: Limits) -> Extract:
    text, notes = decode(data)
    text = _finish(text, notes, limits)
    return Extract(text, notes=tuple(notes))


def _markdown(data: bytes, limits: Limits) -> Extract:
    plain = _text(data, limits)
    return Extract(plain.text, markdown_headings(plain.text), plain.notes)


def _rst(data: bytes, limits: Limits) -> Extract:
    plain = _text(data, limits)
    return Extract(plain.text, rst_headings(plain.text), plain.notes)


def _html(data: bytes, limits: Limits) -> Extract:
    source, notes = decode(data)
    text = _finish(html_to_markdown(_clean(source, notes)), notes, limits)
    return Extract(text, markdown_headings(text), tuple(notes))


def _csv(data: bytes, limits: Limits) -> Extract:
    """Rows as ``column: value`` lines, so that a chunk makes sense without the header row."""
    text, notes = decode(data)
    text = _finish(text, notes, limits)
    try:
        rows = "\n\n".join(_records(text, 4 * len(text)))
    except (csv.Error, OverflowError):
        rows = ""
        notes.append("read as plain text, not as a table")
    return Extract(rows if rows.strip() else text, notes=tuple(notes))


def _records(text: str, most: int) -> Iterator[str]:
    first = text.split("\n", 1)[0]
    delimiter = max(",;\t|", key=first.count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=False)
    header = [name.strip() for name in next(reader, [])]
    length = 0
    for row in reader:
        cells = [
            f"{header[i]}: {cell.strip()}" if i < len(header) and header[i] else cell.strip()
            for i, cell in enumerate(row)
            if cell.strip()
        ]
        record = "\n".join(cells)
        length += len(record)
        if length > most:  # a long header under many short rows would multiply the file
            raise OverflowError
        if record:
            yield record


def _pdf(data: bytes, limits: Limits) -> Extract:
    from pypdf import PdfReader

    notes: list[str] = []
    pages: list[str] = []
    stop = time.monotonic() + limits.max_pdf_seconds
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("an encrypted PDF")
        total = len(reader.pages)
        for page in reader.pages:
            if len(pages) >= limits.max_pdf_pages or time.monotonic() > stop:
                notes.append(f"only the first {len(pages)} of {total} pages were read")
                break
            pages.append(page.extract_text())
    except Unreadable:
        raise
    except Exception as error:  # a damaged PDF can make the parser raise anything, RecursionError included
        if isinstance(error, ModuleNotFoundError) or not any(page.strip() for page in pages):
            raise Unreadable(f"not a readable PDF ({type(error).__name__})") from None
        notes.append(f"only the first {len(pages)} pages could be read ({type(error).__name__})")
    if not any(page.strip() for page in pages):
        raise Unreadable("a PDF without text (a scan?)")
    headings, parts, offset = [], [], 0
    for number, page_text in enumerate(pages, start=1):
        part = _clean(page_text, notes)
        headings.append((offset, f"page {number}"))
        parts.append(part)
        offset += len(part) + 2
    return Extract(_finish("\n\n".join(parts), notes, limits), tuple(headings), tuple(dict.fromkeys(notes)))


def _docx(data: bytes, limits: Limits) -> Extract:
    import docx

    notes: list[str] = []
    lines: list[str] = []
    stop, length = time.monotonic() + limits.max_docx_seconds, 0
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > limits.max_docx_bytes:
            raise Unreadable(f"unpacks to {size} bytes, more than the limit of {limits.max_docx_bytes}")
        for line in _docx_lines(docx.Document(io.BytesIO(data))):
            if time.monotonic() > stop:
                notes.append(f"only what could be read in {limits.max_docx_seconds:g} seconds")
                break
            if line:
                lines.append(line)
                length += len(line)
            if length > limits.max_characters:  # what is left would be cut off
                break
    except (Unreadable, ModuleNotFoundError):
        raise
    except Exception as error:  # damaged archives and XML raise a wide range of types
        raise Unreadable(f"not a readable .docx ({type(error).__name__})") from None
    text = _finish("\n\n".join(lines), notes, limits)
    return Extract(text, markdown_headings(text), tuple(notes))


def _docx_lines(document: Any) -> Iterator[str]:
    """Tables, headings and paragraphs in turn; an empty paragraph is an empty line."""
    from docx.table import Table, _Cell

    for block in document.iter_inner_content():
        if isinstance(block, Table):
            # table.rows[i].cells is quadratic in python-docx; the elements are not
            rows = [[_Cell(cell, block).text.strip() for cell in row.tc_lst] for row in block._tbl.tr_lst]
            yield "\n".join(" | ".join(cells) for cells in rows)
        elif block.text.strip():
            style = block.style.name if block.style is not None else None
            level = re.fullmatch(r"Heading (\d)|Title", style or "")
            yield f"{'#' * int(level[1] or 1)} {block.text.strip()}" if level else block.text
        else:
            yield ""


_READERS: dict[Kind, Callable[[bytes, Limits], Extract]] = {
    "markdown": _markdown,
    "rst": _rst,
    "html": _html,
    "pdf": _pdf,
    "docx": _docx,
    "csv": _csv,
    "text": _text,
    "code": _text,
}
