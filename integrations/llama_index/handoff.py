"""A finished prefill on its way from postprocessor to synthesizer: one-shot, bounded, checked."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import MetadataMode, NodeWithScore

from entroprefill_rag.errors import AnswerTakenError
from entroprefill_rag.integrations.llama_index.nodes import RetainedNode
from entroprefill_rag.integrations.llama_index.task import Task

if TYPE_CHECKING:
    from entroprefill_rag.engine.pending import PendingAnswer


class Handle:
    """A pending answer that can be taken once. Afterwards it holds no cache and no tensor.

    Attributes:
        task: what was asked, to ask it again if the answer is gone. Without the nodes, which refer to this handle;
            unless the answer may be given from a full prefill after all, whose sources are all of them.
        positions: of the retained nodes.
    """

    def __init__(self, task: Task, positions: Sequence[int], pending: PendingAnswer) -> None:
        self.task = task if task.setup.config.on_drift == "restart_full" else task.without_nodes()
        self.positions = tuple(positions)
        self._lock = threading.Lock()
        self._pending: PendingAnswer | None = pending

    def take(self) -> PendingAnswer | None:
        """The pending answer, or None if it was taken or closed."""
        with self._lock:
            pending, self._pending = self._pending, None
        return pending

    def close(self) -> None:
        """Give the answer up and free its cache."""
        pending = self.take()
        if pending is not None:
            pending.close()

    def changed(self, nodes: Sequence[NodeWithScore], mode: MetadataMode) -> str | None:
        """Why ``nodes`` are not those that were handed over, or None."""
        if not all(isinstance(node, RetainedNode) and node.handle is self for node in nodes):
            return "other nodes came in between"
        positions = tuple(node.position for node in nodes if isinstance(node, RetainedNode))
        if positions != self.positions:
            same = sorted(positions) == list(self.positions)
            return "the order of the nodes changed" if same else "nodes were taken out or doubled"
        for node, position in zip(nodes, positions, strict=True):
            chunk = self.task.request.chunks[position]
            if chunk.text and node.node.get_content(metadata_mode=mode) != chunk.text:
                return "the text of a node changed"
            if not chunk.id.startswith(node.node.node_id) and node.node.node_id:
                return "the id of a node changed"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled node travels without the prefill.
        return (type(None), ())


class PendingRuns:
    """The prefills that wait, at most so many: a new one closes the oldest. Holds none of them alive.

    Args:
        most: prefills that may wait at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: list[weakref.ref[Handle]] = []

    def add(self, handle: Handle) -> None:
        """Count a prefill that waits."""
        with self._lock:
            alive = [ref for ref in self._waiting if (one := ref()) is not None and one._pending is not None]
            self._waiting = [*alive, weakref.ref(handle)]
            surplus = self._waiting[: -self._most]
            self._waiting = self._waiting[-self._most :]
        for ref in surplus:
            if (old := ref()) is not None:
                old.close()

    def __len__(self) -> int:
        with self._lock:
            return sum((one := ref()) is not None and one._pending is not None for ref in self._waiting)

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingRuns:
        return PendingRuns(self._most)

    def __getstate__(self) -> dict[str, Any]:
        return {"most": self._most}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["most"])  # type: ignore[misc]


def find(nodes: Sequence[NodeWithScore]) -> Handle | None:
    """The handle that the nodes carry, if any does."""
    return next((node.handle for node in nodes if isinstance(node, RetainedNode) and node.handle is not None), None)


def receive(nodes: Sequence[NodeWithScore], asked: Task) -> tuple[Task, PendingAnswer | None, dict[str, Any] | None]:
    """Take over what a postprocessor prefilled, if it answers what is asked now.

    Args:
        nodes: as the synthesizer got them.
        asked: the question over these nodes.

    Returns:
        The task to answer, the pending answer or None for a full pass, and what to record about it. Where the prefill
        is gone though nothing changed, the task is the original one, over all nodes, so that the answer is the same.
    """
    handle = find(nodes)
    if handle is None:
        return asked, None, None
    why = handle.changed(nodes, asked.setup.metadata_mode) or handle.task.differs(asked)
    if why is not None:
        handle.close()
        return asked, None, {"taken": False, "why": f"{why}; one full pass over the nodes given"}
    try:
        pending = handle.take()
    except AnswerTakenError:
        pending = None
    if pending is None:
        why = "the prefill was taken before, or closed for newer ones; one full pass over the original nodes"
        return handle.task, None, {"taken": False, "why": why}
    return handle.task, pending, {"taken": True, "why": None}
