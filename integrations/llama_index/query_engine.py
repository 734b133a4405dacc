"""EntroPrefillQueryEngine: an index or retriever and the local model, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.integrations.llama_index.synthesizer import EntroPrefillSynthesizer

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend


class EntroPrefillQueryEngine(RetrieverQueryEngine):
    """Retrieves, then answers in one pass that prunes. Needs no other LLM and no global setting.

    Example:
        >>> engine = EntroPrefillQueryEngine.from_args(index, similarity_top_k=8)  # doctest: +SKIP
        >>> response = engine.query("Who decides what is removed?")  # doctest: +SKIP
        >>> response.response, response.source_nodes, response.audit  # doctest: +SKIP
    """

    @classmethod
    def from_args(  # type: ignore[override]
        cls,
        index_or_retriever: Any,
        backend: LocalBackend | None = None,
        *,
        model: str | None = None,
        config: PruningConfig | None = None,
        streaming: bool = False,
        text_qa_template: str | BasePromptTemplate | None = None,
        instruction: str = "",
        metadata_mode: MetadataMode = MetadataMode.LLM,
        empty_response: str | None = None,
        generation: Mapping[str, Any] | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        **retriever_arguments: Any,
    ) -> EntroPrefillQueryEngine:
        """An engine over an index or a retriever.

        Args:
            index_or_retriever: anything with ``as_retriever``, or a retriever.
            backend: a local backend; None resolves ``model`` on first use.
            model: a hub id, folder, GGUF file or packaged name; None takes the configured or packaged one.
            config: limits and audit.
            streaming: answer in pieces.
            text_qa_template: with ``{context_str}`` before ``{query_str}``.
            instruction: protected text before everything else.
            metadata_mode: which metadata goes into a node's text.
            empty_response: answer where nothing was retrieved.
            generation: arguments of the model's ``generate``.
            node_postprocessors: others', run before ours; no EntroPrefillPostprocessor is needed.
            callback_manager: legacy handlers.
            **retriever_arguments: for ``as_retriever``, such as ``similarity_top_k=8``.

        Raises:
            ConfigError: neither an index nor a retriever, or arguments for a retriever that is made already.
        """
        synthesizer = EntroPrefillSynthesizer(
            backend,
            model=model,
            config=config,
            streaming=streaming,
            text_qa_template=text_qa_template,
            instruction=instruction,
            metadata_mode=metadata_mode,
            empty_response=empty_response,
            generation=generation,
            callback_manager=callback_manager,
        )
        return cls(
            retriever=_retriever(index_or_retriever, retriever_arguments),
            response_synthesizer=synthesizer,
            node_postprocessors=list(node_postprocessors or []),
            callback_manager=callback_manager,
        )


def _retriever(given: Any, arguments: dict[str, Any]) -> BaseRetriever:
    if isinstance(given, BaseRetriever):
        if arguments:
            raise ConfigError(
                f"{sorted(arguments)} would be for making a retriever, but a {type(given).__name__} was given; set "
                "them on it, or pass the index"
            )
        return given
    make = getattr(given, "as_retriever", None)
    if make is None:
        raise ConfigError(f"{type(given).__name__} is neither an index nor a retriever; it has no as_retriever()")
    made: BaseRetriever = make(**arguments)
    return made
