"""Nodes that were kept, and the record that says why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import NodeWithScore

from entroprefill_rag.record import AuditRecord, PruneResult

if TYPE_CHECKING:
    from entroprefill_rag.integrations.llama_index.handoff import Handle

METADATA_KEY = "entroprefill"


@dataclass
class Trace:
    """What is known of one run; completed when its answer ends.

    Attributes:
        audit: the record; None only for an empty list of nodes.
        summary: the record in brief, JSON data. The same dict as in ``response.metadata["entroprefill"]``.
    """

    audit: AuditRecord | None = None
    summary: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return self


class RetainedNode(NodeWithScore):
    """A node that was kept. Same node, same score; knows the run that kept it, in private attributes only."""

    _trace: Trace | None = PrivateAttr(default=None)
    _handle: Any = PrivateAttr(default=None)
    _position: int = PrivateAttr(default=-1)

    @property
    def audit(self) -> AuditRecord | None:
        """The record of the run that kept this node."""
        return self._trace.audit if self._trace is not None else None

    @property
    def handle(self) -> Handle | None:
        """The prefill that waits for a synthesizer, if there is one."""
        found: Handle | None = self._handle
        return found

    @property
    def position(self) -> int:
        """Position of the node in the list that was pruned."""
        return self._position

    def __setstate__(self, state: dict[str, Any]) -> None:
        # LlamaIndex makes an unpickled component anew from its fields, which would lose the record.
        super().__setstate__(state)
        kept = state.get("__pydantic_private__") or {}
        self._trace, self._position = kept.get("_trace"), kept.get("_position", -1)


def retained_nodes(
    nodes: list[NodeWithScore],
    kept: Iterable[int],
    outcome: PruneResult,
    trace: Trace,
    *,
    handle: Handle | None = None,
    replace_score: bool = False,
    annotate: bool = False,
) -> list[NodeWithScore]:
    """The nodes at the positions ``kept``, in order; nothing that is passed in is changed.

    Args:
        nodes: as retrieved.
        kept: ascending positions.
        outcome: of the run.
        trace: its record.
        handle: the prefill that waits.
        replace_score: put the chunk's score (low = removed first) in place of the retriever's, where there is one.
        annotate: say in the node's metadata what happened, hidden from model and embedder; changes ``node.hash``.
    """
    scores = _scores(outcome)
    made: list[NodeWithScore] = []
    for position in kept:
        given = nodes[position]
        own = scores.get(position)
        node = given.node
        if annotate:
            note = {"outcome": outcome.audit.outcome, "layer": outcome.audit.accepted_layer, "score": own}
            node = node.model_copy(
                update={
                    "metadata": {**node.metadata, METADATA_KEY: note},
                    "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, METADATA_KEY],
                    "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, METADATA_KEY],
                }
            )
        score = own if replace_score and own is not None else given.score
        new = RetainedNode(node=node, score=None if score is None else float(score))
        new._trace, new._handle, new._position = trace, handle, position
        made.append(new)
    return made


def _scores(outcome: PruneResult) -> dict[int, float]:
    """Score per position of the admitted chunks, where the last trial scored them."""
    trial = outcome.audit.trial
    return dict(enumerate(map(float, trial.scores))) if trial is not None and trial.scores else {}


def get_audit(found: Any) -> AuditRecord | None:
    """The full record behind a response or a list of nodes; None where nothing was pruned or looked at.

    Args:
        found: a response of any kind, a list of nodes, a node, a ``ToolOutput``, or a chat engine's response.
    """
    if found is None or isinstance(found, (str, bytes, dict)):
        return None
    if isinstance(found, (list, tuple)):
        return next((audit for each in found if (audit := get_audit(each)) is not None), None)
    audit = getattr(found, "audit", None)
    if isinstance(audit, AuditRecord):
        return audit
    for name in ("raw_output", "sources", "source_nodes"):
        inner = getattr(found, name, None)
        if inner is not None and inner is not found and (audit := get_audit(inner)) is not None:
            return audit
    return None
