"""Splitting a document into chunks of a paragraph or so, along its headings, paragraphs and sentences.

The boundaries are found by semantic-text-splitter: one wheel without dependencies that knows CommonMark and the
Unicode rules for graphemes, words and sentences (langchain-text-splitters knows neither, and needs langchain-core).
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from entroprefill_rag.documents.folder import Document
from entroprefill_rag.errors import ConfigError, DocumentError
from entroprefill_rag.request import Chunk

if TYPE_CHECKING:
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

_BLOCK = 10_000  # the splitter's time grows with the square of a text without boundaries
_CUTS = ("\n\n", "\n", ". ", "。", " ")
_JOINERS = "\u200d\ufe0e\ufe0f"


def split(document: Document, max_characters: int = 800, overlap: int = 0) -> list[Chunk]:
    """Split a document into chunks with ids ``{path}#{i}``.

    A chunk is between five eighths of ``max_characters`` and all of it, less where a heading or the end comes
    first; about 100-180 tokens of English at the default. Scripts that take several UTF-8 bytes a character take
    several tokens a character as well, so their chunks are shorter by that factor. A chunk's title is the heading
    that holds at its first character, else the path.

    Args:
        document: the document.
        max_characters: longest chunk, in UTF-8 bytes a character of the document on average; at least 50.
        overlap: most characters a chunk repeats of the one before.

    Raises:
        ConfigError: sizes that cannot work.
        DocumentError: semantic-text-splitter is not installed.
    """
    if max_characters < 50 or not 0 <= overlap <= max_characters // 2:
        raise ConfigError(
            f"max_characters must be at least 50 and overlap at most half of it, got {max_characters} and {overlap}"
        )
    chunks: list[Chunk] = []
    offsets = [offset for offset, _ in document.headings]
    for start, text in _pieces(document, max_characters, overlap):
        at = bisect_right(offsets, start)
        title = document.headings[at - 1][1] if at else document.path
        metadata = {"path": document.path, "start": start, "end": start + len(text)}
        chunks.append(Chunk(id=f"{document.path}#{len(chunks)}", text=text, title=title, metadata=metadata))
    return chunks


def _pieces(document: Document, max_characters: int, overlap: int) -> Iterator[tuple[int, str]]:
    """``(offset, text)`` of the pieces of a document that hold more than whitespace."""
    bytes_each = len(document.text.encode()) / len(document.text) if document.text else 1.0
    longest = max(50, round(max_characters / bytes_each))
    splitter = _splitter(document.kind in ("markdown", "html", "docx"), longest, min(overlap, longest // 2))
    for start, block in _blocks(document.text, [offset for offset, _ in document.headings]):
        for offset, text in splitter.chunk_indices(block):
            if text.strip():
                yield start + offset, text


def _splitter(markdown: bool, longest: int, overlap: int) -> TextSplitter | MarkdownSplitter:
    try:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter
    except ModuleNotFoundError as error:
        raise DocumentError(
            "splitting documents needs semantic-text-splitter, which is not installed; "
            "run: pip install -e '.[cli]' in a clone"
        ) from error
    size = (max(1, longest * 5 // 8, overlap + 1), longest)
    return MarkdownSplitter(size, overlap) if markdown else TextSplitter(size, overlap)


def _blocks(text: str, headings: list[int]) -> Iterator[tuple[int, str]]:
    """Cut a long text at headings, else blank lines, lines, sentences, spaces, else anywhere between two graphemes."""
    start = 0
    while len(text) - start > _BLOCK:
        end = start + _BLOCK
        at = bisect_right(headings, end) - 1
        if at >= 0 and headings[at] > start + _BLOCK // 2:
            cut = headings[at]
        else:
            found = ((text.rfind(mark, start + _BLOCK // 2, end), len(mark)) for mark in _CUTS)
            cut = next((position + length for position, length in found if position >= 0), end)
        while cut > end - 64 and (unicodedata.combining(text[cut]) or {text[cut], text[cut - 1]} & set(_JOINERS)):
            cut -= 1
        yield start, text[start:cut]
        start = cut
    yield start, text[start:]
