"""Weights that are loaded already: a backend from LangChain's HuggingFacePipeline or ChatHuggingFace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from entroprefill_rag.errors import ConfigError

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend


def backend_from_pipeline(llm: Any, **kwargs: Any) -> LocalBackend:
    """A backend on the model and tokenizer that ``llm`` holds; nothing is loaded twice.

    Args:
        llm: a ``HuggingFacePipeline``, a ``ChatHuggingFace`` on one, or a text-generation pipeline of transformers.
        **kwargs: passed to :class:`LocalBackend` (``name``, ``style``, ``workers``).

    Raises:
        ConfigError: it holds no local model and tokenizer.
    """
    pipeline = getattr(llm, "llm", llm)
    pipeline = getattr(pipeline, "pipeline", pipeline)
    model, tokenizer = getattr(pipeline, "model", None), getattr(pipeline, "tokenizer", None)
    if tokenizer is None or not callable(getattr(model, "generate", None)):
        raise ConfigError(
            f"{type(llm).__name__} holds no local model with a tokenizer; pass a HuggingFacePipeline, or give the "
            "pair to LocalBackend(model, tokenizer)"
        )
    from entroprefill_rag.engine.backend import LocalBackend

    return LocalBackend(model, tokenizer, **kwargs)
