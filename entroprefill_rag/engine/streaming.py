"""From generated tokens to text, one token at a time; and the ways out of a generation that nobody wants any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.record import GenerationResult, PruneResult, Reason

_BROKEN = "\ufffd"


@dataclass(frozen=True)
class TextPiece:
    """The next piece of an answer."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Restarted:
    """The pruned answer was given up: forget its outcome and its text. A new outcome follows, and text from the start.

    Only with ``on_drift="restart_full"``.
    """

    reason: Reason


SettledItem = PruneResult | TextPiece | GenerationResult
StreamItem = SettledItem | Restarted


class HoldBack:
    """Makes a stream for consumers that cannot take back what they have shown.

    With ``on_drift="restart_full"`` the items of a pruned answer are held back until it has ended or been given up; all
    others pass at once, those of the full answer that takes its place included. No :class:`Restarted` comes out.

    Args:
        config: of the request.
    """

    def __init__(self, config: PruningConfig) -> None:
        self._holding = config.on_drift == "restart_full"
        self._held: list[SettledItem] = []

    def push(self, item: StreamItem) -> list[SettledItem]:
        """The items that are settled now that ``item`` has come."""
        if isinstance(item, Restarted):
            self._holding = False
            self._held.clear()
            return []
        self._held.append(item)
        if isinstance(item, GenerationResult) or (isinstance(item, PruneResult) and not item.pruned):
            self._holding = False
        if self._holding:
            return []
        settled, self._held = self._held, []
        return settled


class HeldStreamer(BaseStreamer):
    """A caller's streamer that gets one answer: what a run hands over is held back until it is known to stand.

    Args:
        inner: the caller's.
        stands: whether what comes from now on can no longer be given up.
    """

    def __init__(self, inner: Any, stands: Callable[[], bool]) -> None:
        self._inner = inner
        self._stands = stands
        self._held: list[Tensor] = []
        self._ended = False

    def put(self, value: Tensor) -> None:
        """The prompt, then each token."""
        self._held.append(value)
        if self._stands():
            self._hand_on()

    def end(self) -> None:
        """The run's end, handed on with its last token."""
        self._ended = True
        if self._stands():
            self.release()

    def release(self) -> None:
        """Hand on all that was held back: the answer stands."""
        self._hand_on()
        if self._ended:
            self._ended = False
            self._inner.end()

    def _hand_on(self) -> None:
        held, self._held = self._held, []
        for value in held:
            self._inner.put(value)


class TextEmitter(BaseStreamer):
    """Decodes token by token and hands on text that will not change any more.

    Only the last few tokens are decoded again at each step (a character may span several tokens, and a token's text may
    depend on the one before), so a long answer costs no more per token than a short one.

    Args:
        decode: token ids -> text.
        emit: receives each piece.
        on_first: called once, before the first piece.
        also: another streamer, the caller's own, that gets every token too.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        emit: Callable[[str], None],
        on_first: Callable[[], None],
        also: Any = None,
    ) -> None:
        self._decode = decode
        self._emit = emit
        self._on_first: Callable[[], None] | None = on_first
        self._also = also
        self._prompt_seen = False
        self._tokens: list[int] = []
        self._start = 0
        self._read = 0

    def put(self, value: Tensor) -> None:
        """Takes the prompt first, then each new token, as ``generate`` hands them over."""
        if self._also is not None:
            self._also.put(value)
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._first()
        self._tokens.extend(value.reshape(-1).tolist())
        before = self._decode(self._tokens[self._start : self._read])
        now = self._decode(self._tokens[self._start :])
        if len(now) > len(before) and not now.endswith(_BROKEN):
            self._emit(now[len(before) :])
            self._start, self._read = self._read, len(self._tokens)

    def end(self) -> None:
        """Hands on what was held back."""
        self._first()
        if self._tokens:
            before = self._decode(self._tokens[self._start : self._read])
            now = self._decode(self._tokens[self._start :])
            if len(now) > len(before):
                self._emit(now[len(before) :])
            self._start = self._read = len(self._tokens)
        if self._also is not None:
            self._also.end()

    def _first(self) -> None:
        if self._on_first is not None:
            callback, self._on_first = self._on_first, None
            callback()


class StopWhenSet(StoppingCriteria):
    """Ends a generation at the next token once an event is set (an abandoned stream, a cancelled task)."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """One boolean for every sequence of the batch."""
        return torch.full((input_ids.shape[0],), self._event.is_set(), dtype=torch.bool, device=input_ids.device)
