"""Batches that mind one machine: calls come one after another unless more is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

Configs = RunnableConfig | Sequence[RunnableConfig] | None


def bounded(config: Configs, length: int) -> list[RunnableConfig]:
    """A configuration per input, whose ``max_concurrency`` is 1 where the caller gave none.

    Every answer at work holds a key-value cache, and prefills take turns anyway.
    """
    return [{**each, "max_concurrency": each.get("max_concurrency") or 1} for each in get_config_list(config, length)]  # type: ignore[return-value,unused-ignore]


class OneAtATime(Runnable[Any, Any]):
    """Batch methods that obey ``max_concurrency``, and take it to be 1 where it is not given."""

    def batch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Answer many inputs; the results come in their order."""
        if not inputs:
            return []
        return super().batch(inputs, bounded(config, len(inputs)), return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """:meth:`batch` for an event loop."""
        if not inputs:
            return []
        return await super().abatch(inputs, bounded(config, len(inputs)), return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(
        self, inputs: Sequence[Any], config: Any = None, *, return_exceptions: Any = False, **kwargs: Any
    ) -> Iterator[tuple[int, Any]]:
        """Answer many inputs; (position, result) as each is done."""
        if inputs:
            configs = bounded(config, len(inputs))
            yield from super().batch_as_completed(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch_as_completed(
        self, inputs: Sequence[Any], config: Any = None, *, return_exceptions: Any = False, **kwargs: Any
    ) -> AsyncIterator[tuple[int, Any]]:
        """:meth:`batch_as_completed` for an event loop."""
        if inputs:
            configs = bounded(config, len(inputs))
            async for each in super().abatch_as_completed(
                inputs, configs, return_exceptions=return_exceptions, **kwargs
            ):
                yield each
