"""Text of strangers, made safe for a terminal: no escape sequence, control byte or text direction of theirs gets out.

Documents, their names and the model's output are all untrusted. What this gives is still not markup: put it into a
``rich.text.Text``, never into a string that rich parses.
"""

from __future__ import annotations

import re

# What begins with an introducer, and how far it may go: all lengths are bounded, so that time stays linear.
_CSI = "(?:\x1b\\[|\x9b)[0-?]{0,64}[ -/]{0,8}"  # colours, cursor, screen
_STRING = "(?:\x1b[\\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c]{0,512}"  # window titles, the clipboard, links
_ESCAPE = "\x1b[ -/]{0,8}"
_SEQUENCE = re.compile(f"{_CSI}[@-~]|{_STRING}(?:\x07|\x1b\\\\|\x9c)|{_ESCAPE}[0-OQ-WYZ\\\\`-~]")
_BEGINNING = re.compile(f"{_CSI}|{_STRING}\x1b?|{_ESCAPE}|\r")
_INTRODUCER = re.compile("[\x1b\x90\x98\x9b\x9d\x9e\x9f]|\r$")
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)


def plain(text: str) -> str:
    """A text of several lines, without escape sequences and control characters; newlines and tabs stay."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def one_line(text: str, most: int = 200) -> str:
    """The same on one line, of at most ``most`` characters."""
    # A little more than is shown is enough: the rest of a huge text need not be searched.
    line = " ".join(plain(text[: 8 * most]).split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


class PlainStream:
    """:func:`plain` for text that comes in pieces: a sequence cut in two is still recognised."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """What may be printed now; the beginning of what may become a sequence (at most 515 characters) waits."""
        text, self._held = self._held + piece, ""
        at = 0
        while found := _INTRODUCER.search(text, at):
            if _BEGINNING.fullmatch(text, found.start()):
                text, self._held = text[: found.start()], text[found.start() :]
            whole = _SEQUENCE.match(text, found.start())
            at = whole.end() if whole else found.start() + 1
        return plain(text)

    def close(self) -> str:
        """What was held back, if it was no sequence after all."""
        rest, self._held = self._held, ""
        return plain(rest)
