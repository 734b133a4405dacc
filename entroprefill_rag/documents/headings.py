"""Where the headings of Markdown and reStructuredText lie, and what holds below them."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MAX_TITLE = 80
_MAX_LINE = 400  # patterns see no longer line: titles are short, and none of the patterns is linear in all cases
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$")
_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}[ \t]*$")
_INLINE = (
    (re.compile(r"!\[[^\]]*\](\([^)]*\)|\[[^\]]*\])"), ""),
    (re.compile(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),
    (re.compile(r"<[^<>]*>"), ""),
    (re.compile(r"[`*]+|(?<!\w)_+|_+(?!\w)"), ""),
    (re.compile(r"\s+"), " "),
)


def markdown_headings(text: str) -> tuple[tuple[int, str], ...]:
    """``(offset, title)`` of every heading outside code fences; a title names its parent: ``Guide > Install``."""
    return _trails(_markdown_lines(text))


def rst_headings(text: str) -> tuple[tuple[int, str], ...]:
    """``(offset, title)`` of every underlined heading; levels in the order in which their marks first occur."""
    return _trails(_underlined_lines(text))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    offset = 0
    for line in text.split("\n"):
        yield offset, line
        offset += len(line) + 1


def _markdown_lines(text: str) -> Iterator[tuple[int, int, str]]:
    """``(offset, level, title)`` of ATX and setext headings."""
    fence = ""
    before, previous = "", (0, "")
    for offset, line in _lines(text):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
                fence = ""
        elif mark:
            fence = mark[1]
        elif atx := _ATX.match(line[:_MAX_LINE]):
            yield offset, len(atx[1]), atx[2]
        elif line[:1] in "=-" and (under := _UNDERLINE.match(line)) and previous[1].strip() and not before.strip():
            yield previous[0], 1 if under[1] == "=" else 2, previous[1]
        before, previous = previous[1], (offset, line)


def _underlined_lines(text: str) -> Iterator[tuple[int, int, str]]:
    levels: dict[str, int] = {}
    previous = (0, "")
    for offset, line in _lines(text):
        under = _UNDERLINE.match(line)
        title = previous[1]
        if under and title.strip() and not _UNDERLINE.match(title) and len(line.rstrip()) >= len(title.rstrip()):
            yield previous[0], levels.setdefault(under[1], len(levels) + 1), title
        previous = (offset, line)


def _trails(found: Iterator[tuple[int, int, str]]) -> tuple[tuple[int, str], ...]:
    trail: list[tuple[int, str]] = []
    headings = []
    for offset, level, raw in found:
        title = _plain(raw)
        if title:
            trail = [entry for entry in trail if entry[0] < level] + [(level, title)]
            headings.append((offset, " > ".join(name for _, name in trail[-2:])))
    return tuple(headings)


def _plain(title: str) -> str:
    title = title[:_MAX_LINE]
    for pattern, replacement in _INLINE:
        title = pattern.sub(replacement, title)
    title = title.strip()
    return title if len(title) <= _MAX_TITLE else title[: _MAX_TITLE - 1].rstrip() + "…"
