"""What an answer is worth, and whether what a question needs was kept."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from entroprefill_rag.bench.questions import Need

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_POINT = re.compile(r"(?<=\d)\.(?=\d)")
_DELETED = str.maketrans({**dict.fromkeys(string.punctuation, ""), "-": " ", "–": " ", "—": " ", "/": " "})
_DECLINES = re.compile(
    r"unanswerable|can(not|'t) be (answered|determined|found)|no (information|answer|mention)|unable to (answer|find)"
    r"|not (mentioned|provided|specified|stated|given|available|contain|include|mention|provide|specify|state|know)"
    r"|n't (mention|provide|specify|state|know|contain|include|say)|do not (have|know)|insufficient",
    re.IGNORECASE,
)


def normalised(text: str) -> str:
    """Lower case, one space between words; no articles and punctuation, but decimal points stay."""
    text = _THOUSANDS.sub("", text.casefold())
    text = _POINT.sub("\N{BULLET}", text).translate(_DELETED).replace("\N{BULLET}", ".")
    return " ".join(_ARTICLES.sub(" ", text).split())


def found(answer: str, accepted: Sequence[str]) -> bool | None:
    """Whether an accepted string occurs in the answer, as whole words; None where there is none to find."""
    if not accepted:
        return None
    text = normalised(answer)
    for one in accepted:
        wanted = normalised(one)
        if not wanted:
            if one.casefold().strip() and one.casefold().strip() in answer.casefold():
                return True
            continue
        # Scripts that write no spaces have no whole words to hold to.
        if f" {wanted} " in f" {text} " or (not wanted.isascii() and wanted in text):
            return True
    return False


def token_f1(answer: str, accepted: Sequence[str]) -> float | None:
    """Largest harmonic mean of the words' precision and recall; None where there is no accepted string."""
    if not accepted:
        return None
    given = normalised(answer).split()
    return max(_f1(given, normalised(one).split()) for one in accepted)


def _f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    same = sum((Counter(given) & Counter(wanted)).values())
    return 2 * same / (len(given) + len(wanted))


def declines(answer: str) -> bool:
    """Whether an answer says that it cannot be given; judged by set phrases, in English."""
    return not answer.strip() or _DECLINES.search(answer) is not None


def need_met(kept: Iterable[str], gold: frozenset[str], need: Need) -> bool | None:
    """Whether what the question needs was kept; None where it needs nothing."""
    if not gold or need == "none":
        return None
    left = gold.intersection(kept)
    return left == gold if need == "all" else bool(left)
