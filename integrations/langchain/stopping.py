"""Stop texts: generation ends at the first of them, and none of it is shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Cuts streamed text before the first stop text; holds back what may become one.

    Args:
        stops: the stop texts; empty ones are left out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come."""
        return self._stopped

    def push(self, text: str) -> str:
        """What may be shown now that ``text`` has come."""
        if self._stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """What was held back and did not become a stop text."""
        shown, self._held = self._held, ""
        return shown


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """``text`` up to the first stop text, and whether there is one."""
    stop = StopText(stops)
    return stop.push(text) + stop.rest(), stop.stopped


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
