"""The visible text of an HTML page, in the shape of Markdown.

lxml's event parser takes time linear in the page, however it is nested or left open; trees do not.
"""

from __future__ import annotations

import re

# fmt: off
_BLOCKS = frozenset([
    "address", "article", "aside", "blockquote", "caption", "dd", "details", "div", "dl", "dt", "fieldset",
    "figcaption", "figure", "footer", "form", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section",
    "summary", "table", "tr", "ul",
])
# fmt: on
_CLOSE = frozenset(["li", "tr", "dt", "dd"])
_UNSEEN = frozenset(["script", "style", "noscript", "template", "svg", "iframe", "object", "canvas", "title"])
_HEADINGS = {f"h{level}": "#" * level for level in range(1, 7)}
_SPACE = re.compile(r"[ \t\r\n\f]+")


def html_to_markdown(source: str) -> str:
    """The visible text: headings as ``#`` lines, table cells parted by ``|``, the page's title as first heading.

    Raises:
        ModuleNotFoundError: lxml is not installed.
    """
    from lxml import etree  # type: ignore[import-untyped]

    page = _Page()
    parser = etree.HTMLParser(target=page, no_network=True)
    parser.feed(source)
    parser.close()
    return page.text()


class _Page:
    """Receives the parser's events."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._title: list[str] = []
        self._unseen: list[str] = []
        self._pre = 0
        self._heading: list[str] | None = None

    def start(self, tag: str, _: object) -> None:
        if tag in _UNSEEN:
            self._unseen.append(tag)
        elif not self._unseen:
            self._open(tag)

    def _open(self, tag: str) -> None:
        if tag in _HEADINGS:
            self._heading = []
        elif tag == "br":
            self._parts.append("\n")
        elif tag in _BLOCKS:
            self._gap(tag)
            self._pre += tag == "pre"

    def end(self, tag: str) -> None:
        if self._unseen:
            if tag == self._unseen[-1]:
                self._unseen.pop()
        elif tag in _HEADINGS:
            words = " ".join("".join(self._heading or ()).split())
            self._heading = None
            if words:
                self._parts.append(f"\n\n{_HEADINGS[tag]} {words}\n\n")
        elif tag in ("td", "th"):
            self._parts.append(" | ")
        elif tag in _BLOCKS:
            self._pre = max(0, self._pre - (tag == "pre"))
            self._gap(tag)

    def data(self, text: str) -> None:
        if self._unseen:
            if self._unseen[-1] == "title":
                self._title.append(text)
        elif self._heading is not None:
            self._heading.append(text)
        else:
            self._parts.append(text if self._pre else _SPACE.sub(" ", text))

    def close(self) -> None:
        if self._heading:
            self._parts.append("".join(self._heading))

    def _gap(self, tag: str) -> None:
        self._parts.append("\n" if tag in _CLOSE else "\n\n")

    def text(self) -> str:
        lines = (line.rstrip().removesuffix(" |") for line in "".join(self._parts).split("\n"))
        body = "\n".join(line[1:] if line[:1] == " " and line[1:2] != " " else line for line in lines)
        body = re.sub(r"\n{3,}", "\n\n", body).strip()
        title = " ".join("".join(self._title).split())
        return f"# {title}\n\n{body}" if title and body and not body.startswith("# ") else body or title
