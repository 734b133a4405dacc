"""Hooks and attention function on one model, from construction to ``close()``; idle without an active run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from entroprefill_rag.engine.families import PREFIX, Anatomy, inspect
from entroprefill_rag.engine.run import PrefillRun
from entroprefill_rag.engine.tap import ACTIVE_RUN, register_tap

_COUNT = "_entroprefill_installations"


class Installation:
    """What this package adds to one model.

    Several may stand on one model: each run belongs to one installation, and only its hooks act on it. The last one to
    close gives the model its attention implementation back.

    Args:
        model: a causal language model. One that cannot be pruned is left untouched; ``anatomy.why_not`` says why.
    """

    def __init__(self, model: nn.Module) -> None:
        self.anatomy: Anatomy = inspect(model)
        self._handles: list[Any] = []
        self._closed = False
        if self.anatomy.why_not is None:
            self._install()

    def _install(self) -> None:
        decoder, config = self.anatomy.decoder, self.anatomy.config
        config._attn_implementation = register_tap(self.anatomy.kernel)
        setattr(decoder, _COUNT, getattr(decoder, _COUNT, 0) + 1)
        mine = ACTIVE_RUN.get

        def active() -> PrefillRun | None:
            run = mine()
            return run if run is not None and run.anatomy is self.anatomy else None

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (run := active()) is not None:
                run.begin_forward(args, kwargs)

        def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if (run := active()) is not None:
                run.end_forward()

        def enter(layer: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                run = active()
                return None if run is None else run.enter_layer(layer, args, kwargs)

            return hook

        self._handles.append(decoder.register_forward_pre_hook(begin, with_kwargs=True))
        self._handles.append(decoder.register_forward_hook(end))
        for layer, module in enumerate(self.anatomy.layers):
            self._handles.append(module.register_forward_pre_hook(enter(layer), with_kwargs=True))

    @contextmanager
    def activate(self, run: PrefillRun) -> Iterator[PrefillRun]:
        """Make ``run`` the active run of this thread or task."""
        token = ACTIVE_RUN.set(run)
        try:
            yield run
        finally:
            ACTIVE_RUN.reset(token)

    def close(self) -> None:
        """Take everything off the model again. Calling it twice does no harm."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        if not self._handles:
            return
        decoder, config = self.anatomy.decoder, self.anatomy.config
        left = getattr(decoder, _COUNT, 1) - 1
        setattr(decoder, _COUNT, left)
        if left <= 0:
            delattr(decoder, _COUNT)
            if str(config._attn_implementation).startswith(PREFIX):
                config._attn_implementation = self.anatomy.kernel
