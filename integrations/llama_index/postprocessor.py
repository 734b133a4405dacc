"""EntroPrefillPostprocessor: keeps the nodes that the query's attention needs, and hands its prefill on if it can."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_validator
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import RequestError, TemplateError
from entroprefill_rag.integrations._shared import BackendSource, summary
from entroprefill_rag.integrations.llama_index.answering import abegin
from entroprefill_rag.integrations.llama_index.events import reranking, say_audit
from entroprefill_rag.integrations.llama_index.handoff import Handle, PendingRuns
from entroprefill_rag.integrations.llama_index.llm import stand_in_for_missing_default
from entroprefill_rag.integrations.llama_index.nodes import Trace, retained_nodes
from entroprefill_rag.integrations.llama_index.prompts import DEFAULT_TEXT_QA, as_template
from entroprefill_rag.integrations.llama_index.synthesizer import EntroPrefillSynthesizer
from entroprefill_rag.integrations.llama_index.task import Setup, Task
from entroprefill_rag.record import PruneResult

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.engine.pending import PendingAnswer


class _Partner:
    """The synthesizer that takes over, while it lives. In a copy or pickle of both, the two copies are partners.

    Args:
        *synthesizers: the first that lives is meant; none is kept alive.
    """

    def __init__(self, *synthesizers: EntroPrefillSynthesizer) -> None:
        self._refs = [weakref.ref(each) for each in synthesizers]

    def get(self) -> EntroPrefillSynthesizer | None:
        return next((living for ref in self._refs if (living := ref()) is not None), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Partner:
        given = self.get()
        # A copy that nobody else wanted ends with the copying; then the original is meant, as before.
        return _Partner() if given is None else _Partner(copy.deepcopy(given, memo), given)

    def __reduce__(self) -> tuple[Any, ...]:
        given = self.get()
        return _Partner, () if given is None else (given,)


class EntroPrefillPostprocessor(BaseNodePostprocessor):
    """Drops nodes that a local model's attention does not need for the query, under caps and an audit.

    With a synthesizer made by :meth:`synthesizer`, the prefill is done once and the answer goes on from it. With any
    other LLM it filters: the local model stops at the accepted layer, and the other LLM reads the retained nodes as a
    prompt of its own, about which the record claims nothing.

    Retained nodes keep their node, score and order. The record is had with ``get_audit(nodes)`` or
    ``get_audit(response)``. Constructing loads nothing; the model is resolved on first use: ``backend``, ``model``,
    ``set_default_backend``, ``ENTROPREFILL_MODEL``, the packaged small model.

    Example:
        >>> pp = EntroPrefillPostprocessor()
        >>> engine = index.as_query_engine(  # doctest: +SKIP
        ...     node_postprocessors=[pp], response_synthesizer=pp.synthesizer()
        ... )
    """

    model: str | None = Field(default=None, description="Hub id, folder, GGUF file or packaged name; None: see above.")
    mode: Literal["auto", "filter", "handoff"] = Field(
        default="auto", description="'auto' hands its prefill to a living synthesizer made by `synthesizer()`."
    )
    config: PruningConfig = Field(default_factory=PruningConfig, description="Limits and audit.")
    instruction: str = Field(default="", description="Protected text before everything else; empty: a default.")
    text_qa_template: str | None = Field(
        default=None, description="With {context_str} before {query_str}; None: the backend's style."
    )
    metadata_mode: MetadataMode = Field(default=MetadataMode.LLM, description="Which metadata a node's text has.")
    replace_score: bool = Field(default=False, description="Put the chunk's score in place of the retriever's.")
    annotate: bool = Field(
        default=False, description="Note the outcome in the metadata of copies, hidden from model and embedder."
    )
    max_pending: int = Field(default=4, ge=1, le=64, description="Prefills that may wait for a synthesizer at a time.")
    _source: BackendSource = PrivateAttr()
    _partner: _Partner = PrivateAttr()
    _waiting: PendingRuns = PrivateAttr()

    def __init__(
        self, backend: LocalBackend | None = None, *, source: BackendSource | None = None, **fields: Any
    ) -> None:
        source = source or BackendSource(backend, fields.get("model"))
        # So that a serialized copy finds the backend it had, and does not quietly take another.
        fields["model"] = source.model
        super().__init__(**fields)
        self._source = source
        self._partner = _Partner()
        self._waiting = PendingRuns(self.max_pending)
        as_template(self.text_qa_template)

    @field_validator("text_qa_template", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if not isinstance(value, BasePromptTemplate):
            return value
        plain = isinstance(value, PromptTemplate) and not value.kwargs and not value.template_var_mappings
        if plain and not value.function_mappings:
            return value.get_template()
        raise TemplateError(
            f"a {type(value).__name__} with more than text cannot be kept here, as a postprocessor's fields are JSON "
            "data; give it to the synthesizer: pp.synthesizer(text_qa_template=...)"
        )

    @classmethod
    def class_name(cls) -> str:
        """Name for serialization."""
        return "EntroPrefillPostprocessor"

    def __setstate__(self, state: dict[str, Any]) -> None:
        # LlamaIndex makes an unpickled component anew from its fields.
        super().__setstate__(state)
        self._partner = (state.get("__pydantic_private__") or {}).get("_partner") or _Partner()

    def __repr__(self) -> str:
        return f"EntroPrefillPostprocessor(model={self._source.name!r}, mode={self.mode!r})"

    __str__ = __repr__

    def synthesizer(
        self,
        *,
        streaming: bool = False,
        text_qa_template: str | BasePromptTemplate | None = None,
        empty_response: str | None = None,
        generation: Mapping[str, Any] | None = None,
        **generation_arguments: Any,
    ) -> EntroPrefillSynthesizer:
        """A synthesizer that goes on from this postprocessor's prefill; while it lives, 'auto' means hand-off.

        Where no default LLM is configured for LlamaIndex and none could be had, the local model becomes it, because
        ``index.as_query_engine`` asks for one whatever it is given.

        Args:
            streaming: answer in pieces.
            text_qa_template: in place of this postprocessor's own.
            empty_response: answer where there are no nodes.
            generation: arguments of the model's ``generate``.
            **generation_arguments: the same, one by one: ``max_new_tokens=100``.
        """
        made = EntroPrefillSynthesizer(
            config=self.config,
            streaming=streaming,
            text_qa_template=text_qa_template if text_qa_template is not None else self.text_qa_template,
            instruction=self.instruction,
            metadata_mode=self.metadata_mode,
            empty_response=empty_response,
            generation={**(generation or {}), **generation_arguments},
            source=self._source,
        )
        self._partner = _Partner(made)
        stand_in_for_missing_default(made._llm)
        return made

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": as_template(self.text_qa_template) or DEFAULT_TEXT_QA}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if (new := prompts.get("text_qa_template")) is not None:
            as_template(new)
            self.text_qa_template = self._as_text(new)

    # -- one call -------------------------------------------------------------------------------------------------

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = _asked(query_bundle)
        if not nodes:
            return []
        setup, hand_over = self._setup()
        task = setup.task(nodes, query.query_str)
        with reranking(self.callback_manager, nodes, query, task.backend.name) as kept:
            if hand_over:
                pending = task.backend.begin(task.request, setup.config, **setup.generation)
                kept.nodes = self._handed(task, pending)
            else:
                kept.nodes = self._filtered(task, task.backend.prune(task.request, setup.config))
            return kept.nodes

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = _asked(query_bundle)
        if not nodes:
            return []
        setup, hand_over = self._setup()
        task = await setup.atask(nodes, query.query_str)
        with reranking(self.callback_manager, nodes, query, task.backend.name) as kept:
            if hand_over:
                kept.nodes = self._handed(task, await abegin(task))
            else:
                kept.nodes = self._filtered(task, await task.backend.aprune(task.request, setup.config))
            return kept.nodes

    def _setup(self) -> tuple[Setup, bool]:
        """How the question is put, and whether the prefill is handed on."""
        partner = self._partner.get()
        if partner is not None and self.mode != "filter":
            return partner.setup, True
        own = Setup(
            source=self._source,
            config=self.config,
            metadata_mode=self.metadata_mode,
            instruction=self.instruction,
            template=as_template(self.text_qa_template),
        )
        return own, self.mode == "handoff"

    def _filtered(self, task: Task, outcome: PruneResult) -> list[NodeWithScore]:
        return self._kept(task, outcome, "filter", None)

    def _handed(self, task: Task, pending: PendingAnswer) -> list[NodeWithScore]:
        handle = Handle(task, task.kept(pending.outcome), pending)
        self._waiting.add(handle)
        return self._kept(task, pending.outcome, "handoff", handle)

    def _kept(self, task: Task, outcome: PruneResult, mode: str, handle: Handle | None) -> list[NodeWithScore]:
        stand_ins = task.ids.report()
        more: dict[str, Any] = {"stand_in_ids": stand_ins} if stand_ins else {}
        brief = summary(
            outcome.audit, mode=mode, timings=outcome.timings, full_record="get_audit(nodes) gives it", **more
        )
        say_audit(brief)
        return retained_nodes(
            list(task.nodes),
            task.kept(outcome),
            outcome,
            Trace(outcome.audit, brief),
            handle=handle,
            replace_score=self.replace_score,
            annotate=self.annotate,
        )


def _asked(query: QueryBundle | None) -> QueryBundle:
    if query is not None and not isinstance(query.query_str, str):
        raise RequestError(f"the query must be text, got {type(query.query_str).__name__}")
    if query is None or not query.query_str.strip():
        raise RequestError(
            "no query: nodes are judged by the query's attention to them; pass query_str=... or query_bundle=..."
        )
    return query
