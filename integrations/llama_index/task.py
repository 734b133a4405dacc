"""A question over nodes as a request to a backend, and the way back from chunk ids to nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseNode, ImageNode, MetadataMode, NodeWithScore

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import RequestError
from entroprefill_rag.integrations._shared import BackendSource, Ids, restyled, unique_ids
from entroprefill_rag.integrations.llama_index.prompts import wording
from entroprefill_rag.record import GenerationResult, PruneResult
from entroprefill_rag.request import Chunk, RagRequest

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend


@dataclass(frozen=True)
class Setup:
    """How questions are put to the model.

    Attributes:
        source: of the backend.
        config: limits and audit.
        metadata_mode: which metadata goes into a node's text; ``LLM`` is what LlamaIndex shows to a model.
        instruction: protected; empty takes the template's or the backend's.
        template: with ``{context_str}`` before ``{query_str}``; None takes the backend's style.
        generation: arguments of ``generate``.
    """

    source: BackendSource
    config: PruningConfig
    metadata_mode: MetadataMode = MetadataMode.LLM
    instruction: str = ""
    template: BasePromptTemplate | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    def task(self, nodes: Sequence[NodeWithScore], query: str, variables: Mapping[str, Any] | None = None) -> Task:
        """The request of ``query`` over ``nodes``, and the backend that takes it; loads the model if need be.

        Raises:
            TemplateError: the template does not put all documents before the query.
            RequestError: an empty query, or something that is no NodeWithScore.
            ModelSourceError: there is no model.
        """
        odd = next((each for each in nodes if not isinstance(each, NodeWithScore)), None)
        if odd is not None:
            raise RequestError(f"nodes must be NodeWithScore, got {type(odd).__name__}; a retriever makes them")
        backend = self.source.get()
        chat = backend.style.chat is not False and bool(getattr(backend.tokenizer, "chat_template", None))
        words = wording(self.template, backend.style, instruction=self.instruction, chat=chat, variables=variables)
        read = [_read(each.node, self.metadata_mode) for each in nodes]
        ids = unique_ids([each.node.node_id for each in nodes], [text for text, _ in read])
        request = RagRequest(
            instruction=words.instruction,
            history=words.history,
            query=query,
            chunks=tuple(
                Chunk(id=chunk_id, text=text, protected=protected)
                for chunk_id, (text, protected) in zip(ids.ids, read, strict=True)
            ),
        )
        return Task(self, restyled(backend, words.style), request, tuple(nodes), ids)

    async def atask(
        self, nodes: Sequence[NodeWithScore], query: str, variables: Mapping[str, Any] | None = None
    ) -> Task:
        """:meth:`task` in a worker thread: a model may have to be loaded, and a tokenizer looked through."""
        backend = self.source.get() if self.source.loaded else await asyncio.to_thread(self.source.get)
        return await backend._workers.call(partial(self.task, nodes, query, variables))


@dataclass(frozen=True)
class Task:
    """One question, ready to be asked."""

    setup: Setup
    backend: LocalBackend
    request: RagRequest
    nodes: tuple[NodeWithScore, ...]
    ids: Ids

    def kept(self, outcome: PruneResult | GenerationResult) -> list[int]:
        """Positions of the retained nodes, ascending."""
        retained = set(outcome.retained_ids)
        return [position for position, chunk_id in enumerate(self.ids.ids) if chunk_id in retained]

    def differs(self, other: Task) -> str | None:
        """Why another task would not give this one's answer; the nodes' own comparison is :meth:`changed`."""
        if self.request.query != other.request.query:
            return "the query changed"
        if (self.request.instruction, self.request.history) != (other.request.instruction, other.request.history):
            return "the instruction changed"
        if self.backend.style != other.backend.style:
            return "the prompt template changed"
        if self.backend.model is not other.backend.model:
            return "the model changed"
        mine, theirs = self.setup, other.setup
        if mine.config != theirs.config or dict(mine.generation) != dict(theirs.generation):
            return "the configuration changed"
        return None

    def prompt_text(self) -> str:
        """The prompt for traces: all that the model reads, without the marks of a chat template."""
        chunks = [
            self.backend.style.header(chunk, number) + chunk.text
            for number, chunk in enumerate(self.request.chunks, start=1)
        ]
        told = self.request.instruction or self.backend.style.instruction
        return "\n\n".join(part for part in (told, *chunks, self.request.query) if part)

    def without_nodes(self) -> Task:
        """The same without references to nodes."""
        return replace(self, nodes=())


def _read(node: BaseNode, mode: MetadataMode) -> tuple[str, bool]:
    """A node's text, and whether it holds more than text: then it must stay, as only a part of it can be judged."""
    other = isinstance(node, ImageNode) or any(
        getattr(node, f"{kind}_resource", None) is not None for kind in ("image", "audio", "video")
    )
    try:
        return node.get_content(metadata_mode=mode), other
    except (NotImplementedError, ValueError):
        return "", True
