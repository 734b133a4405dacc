"""Text to tokens, segment by segment: what a user wrote can never become a special token (section 1)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from entroprefill_rag.engine.plain_tokenizer import PlainTokenizer
from entroprefill_rag.errors import EntroPrefillError

_SURROGATE = re.compile("[\ud800-\udfff]")
_SPELLED_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
# Written in front of a text that continues another one, then cut off: tokenizers of the SentencePiece kind put a space
# before the first word. Which anchor merges with nothing depends on the tokenizer and on the text.
_ANCHORS = ("\n", "|", ".", "0", "é", "。", "€")
LONE_SURROGATE = "\ud800"


@dataclass(frozen=True)
class Control:
    """A token that only a template may produce."""

    id: int
    text: str


@dataclass(frozen=True)
class Cleaned:
    """A text that the tokenizer can encode.

    Attributes:
        text: the text with what cannot be encoded replaced.
        replaced: the characters that were replaced, and how often; ``LONE_SURROGATE`` stands for all of its kind.
    """

    text: str
    replaced: Counter[str]


class SegmentTokenizer:
    """Encodes the parts of a prompt so that concatenating them is right.

    Reads the tokenizer once and never changes it; afterwards any number of threads may encode. Make it anew after
    adding tokens to the tokenizer.

    Args:
        tokenizer: a tokenizer of transformers, fast or slow.

    Attributes:
        tokenizer: the tokenizer given.
        forbidden: ids that no user text may hold: the control tokens, padding and "unknown" among them.
        substitute: stands for characters that the tokenizer cannot encode (a space for white space); empty where it
            can encode nothing that could stand for them.

    Raises:
        ConfigError: a tokenizer that does not say which tokens are special.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._plain = PlainTokenizer(tokenizer)
        self.forbidden = frozenset(self._plain.controls.values())
        alone, after = self._plain.encode(["a", "|a"])
        self._adds_space = after[-1:] != alone
        # Unigram vocabularies hold the names of bytes as pieces like any other.
        self._spells_bytes = any(len(ids) == 1 for ids in self._batch(["<0x41>", "<0x0A>"], [True, True]))
        self._known: set[str] = set()
        self._substitutes: dict[int, str] = {}
        self.substitute = next((mark for mark in ("\ufffd", "?", " ") if self._can_encode([mark])[0]), "")

    @property
    def bos(self) -> tuple[int, ...]:
        """Ids that the tokenizer by itself puts before a text."""
        return self._plain.bos

    @property
    def begins_after_control(self) -> bool:
        """Whether a text right after a control token begins as at the start of a prompt."""
        return self._adds_space and self._plain.begins_after_control

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included, nothing tidied up."""
        return self._plain.decode(ids)

    def clean(self, texts: Sequence[str]) -> list[Cleaned]:
        """Replace lone surrogates and characters that the tokenizer drops or knows only as "unknown"."""
        whole = [_pair_surrogates(text) for text in texts]
        fresh = sorted(set().union(*whole) - self._known)
        for character, fine in zip(fresh, self._can_encode(fresh), strict=True):
            if not fine:
                blank = character.isspace() and self._can_encode([" "])[0]
                self._substitutes[ord(character)] = " " if blank else self.substitute
        self._known.update(fresh)
        return [self._cleaned(before, text) for before, text in zip(texts, whole, strict=True)]

    def _cleaned(self, before: str, text: str) -> Cleaned:
        replaced: Counter[str] = Counter()
        if text != before:
            replaced[LONE_SURROGATE] = text.count("\ufffd") - before.count("\ufffd")
        if self._substitutes:
            replaced.update(character for character in text if ord(character) in self._substitutes)
            text = text.translate(self._substitutes)
        return Cleaned(text, +replaced)

    def _can_encode(self, characters: Sequence[str]) -> list[bool]:
        answers = []
        for character, ids in zip(characters, self._batch(characters, [True] * len(characters)), strict=True):
            if not self.forbidden.isdisjoint(ids):
                answers.append(False)
            elif ids:
                answers.append(character == "\ufffd" or "\ufffd" not in self.decode(ids))
            else:
                answers.append(self._plain.leaves_out(character))
        return answers

    def split_controls(self, literal: str) -> list[str | Control]:
        """Cut a template's own text at its control tokens; the longest wins, as in the tokenizer itself."""
        present = sorted((name for name in self._plain.controls if name and name in literal), key=len, reverse=True)
        if not present:
            return [literal] if literal else []
        parts: list[str | Control] = []
        end = 0
        for match in re.finditer("|".join(map(self._pattern, present)), literal):
            if match.start() > end:
                parts.append(literal[end : match.start()])
            name = next(name for name in present if name in match.group())
            parts.append(Control(self._plain.controls[name], match.group()))
            end = match.end()
        return [*parts, literal[end:]] if end < len(literal) else parts

    def _pattern(self, name: str) -> str:
        flags = self._plain.flags.get(name)
        left = r"\s*" if flags is not None and flags.lstrip else ""
        right = r"\s*" if flags is not None and flags.rstrip else ""
        return f"{left}{re.escape(name)}{right}"

    def encode(self, texts: Sequence[str], continues: Sequence[bool]) -> list[list[int]]:
        """Encode cleaned texts, all in one call to the tokenizer; no control token comes out.

        Args:
            texts: from :meth:`clean`.
            continues: per text, whether it continues the text before it; if not, it begins as the tokenizer begins.

        Raises:
            EntroPrefillError: a control token would come out all the same (a fault of this package).
        """
        results = self._batch(texts, continues)
        for index, (text, joined) in enumerate(zip(texts, continues, strict=True)):
            if self._spells_control(text, results[index]):
                results[index] = self._encode_in_halves(text, joined)
        return results

    def _spells_control(self, text: str, ids: list[int]) -> bool:
        if self._spells_bytes and _SPELLED_BYTE.search(text) is not None:
            return True
        return not self.forbidden.isdisjoint(ids)

    def _encode_in_halves(self, text: str, joined: bool) -> list[int]:
        """Cut until no piece spells a control token; Unigram vocabularies hold ``</s>`` as a piece like any other."""
        (ids,) = self._batch([text], [joined])
        if not self._spells_control(text, ids):
            return ids
        if len(text) < 2:
            raise EntroPrefillError(
                f"internal: U+{ord(text):04X} encodes to control token {ids} though it was found encodable; please "
                f"report this with the name of the tokenizer ({type(self.tokenizer).__name__})"
            )
        middle = len(text) // 2
        return self._encode_in_halves(text[:middle], joined) + self._encode_in_halves(text[middle:], True)

    def _batch(self, texts: Sequence[str], continues: Sequence[bool]) -> list[list[int]]:
        if not self._adds_space or not any(continues):
            return self._plain.encode(texts)
        results: list[list[int]] = [[] for _ in texts]
        waiting = [index for index, joined in enumerate(continues) if joined and texts[index]]
        alone = [index for index, joined in enumerate(continues) if not joined]
        for anchor in _ANCHORS:
            if not waiting:
                break
            head, *tried = self._plain.encode([anchor, *(anchor + texts[index] for index in waiting)])
            usable = bool(head) and self.forbidden.isdisjoint(head)
            failed = []
            for index, ids in zip(waiting, tried, strict=True):
                if usable and ids[: len(head)] == head:
                    results[index] = ids[len(head) :]
                else:
                    failed.append(index)
            waiting = failed
        # What merges with every anchor keeps the tokenizer's space; the layout notes that decoding shows it.
        alone += waiting
        for index, ids in zip(alone, self._plain.encode([texts[index] for index in alone]), strict=True):
            results[index] = ids
        return results


def _pair_surrogates(text: str) -> str:
    """Join surrogates that come in pairs; lone ones become U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
