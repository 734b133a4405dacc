"""What a check of a record finds: a number that does not follow from the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

RELATIVE = 2e-8
"""Records hold nine significant digits; what is recomputed from two of them may differ by a few units of the ninth."""
ABSOLUTE = 2e-9


@dataclass(frozen=True)
class Finding:
    """One number that does not follow.

    Attributes:
        path: where it stands in the record, as in ``trials[0].audits[1].upper[3]``.
        recorded: what stands there.
        follows: what follows from the rest of the record, or a limit in words.
        rule: how, in words.
    """

    path: str
    recorded: Any
    follows: Any
    rule: str


class Findings:
    """Collects findings while the parts of a record are checked."""

    def __init__(self) -> None:
        self.found: list[Finding] = []

    def expect(self, path: str, recorded: Any, follows: Any, rule: str) -> bool:
        """``recorded`` must be ``follows``: numbers up to rounding, sequences element by element."""
        place = _first_difference(recorded, follows)
        if place is None:
            return True
        where, one, other = place
        self.found.append(Finding(path + where, one, other, rule))
        return False

    def require(self, holds: bool, path: str, recorded: Any, follows: str, rule: str) -> bool:
        """A condition on ``recorded`` that is not an equation; ``follows`` says it in words."""
        if not holds:
            self.found.append(Finding(path, recorded, follows, rule))
        return holds

    def between(
        self, path: str, recorded: Sequence[float], low: Sequence[float], high: Sequence[float], rule: str
    ) -> None:
        """Each number must lie in its range, up to rounding."""
        for i, (value, least, most) in enumerate(zip(recorded, low, high, strict=True)):
            spare = ABSOLUTE + RELATIVE * max(abs(least), abs(most))
            if not least - spare <= value <= most + spare:
                self.found.append(Finding(f"{path}[{i}]", value, f"between {least:.9g} and {most:.9g}", rule))
                return

    @contextmanager
    def part(self, path: str) -> Iterator[None]:
        """Numbers so wrong that nothing can be computed from them are a finding too, not an error."""
        try:
            yield
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            self.found.append(Finding(path, "", "", f"cannot be recomputed: {type(error).__name__}: {reason}"))


def close(one: float, other: float) -> bool:
    """Equal up to the rounding of a record."""
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _first_difference(one: Any, other: Any) -> tuple[str, Any, Any] | None:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return "", f"{len(one)} entries", f"{len(other)} entries"
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            if (place := _first_difference(left, right)) is not None:
                return f"[{i}]{place[0]}", place[1], place[2]
        return None
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*other, *(name for name in one if name not in other)]:
            left, right = one.get(name, "(absent)"), other.get(name, "(absent)")
            if (place := _first_difference(left, right)) is not None:
                return f".{name}{place[0]}", place[1], place[2]
        return None
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    if numbers and (isinstance(one, float) or isinstance(other, float)):
        return None if close(one, other) else ("", one, other)
    same = one == other and isinstance(one, bool) == isinstance(other, bool)
    return None if same else ("", one, other)
