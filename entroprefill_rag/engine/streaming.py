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

_BROKEN = "\ufffd"


@dataclass(frozen=True)
class TextPiece:
    """The next piece of an answer."""

    text: str

    def __str__(self) -> str:
        return self.text


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
