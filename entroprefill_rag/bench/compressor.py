"""A token-level compressor: the llmlingua package, with the very model that answers.

The package's 0.2.2 cannot load here by itself: it fetches the tokenizer of another vendor's model, for counting, and
takes a cache apart as transformers 4 made them. Given the model's own tokenizer and the cache as it expects it, it
runs; its compression itself is not touched.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from entroprefill_rag.bench.questions import Question
from entroprefill_rag.bench.rankers import shown
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.request import Chunk, RagRequest


class PairsOfKeysAndValues:
    """A model whose cache goes in and comes out as a list of (keys, values), one of each layer.

    Args:
        model: a causal language model of transformers 5 or late 4.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model.config
        self.device = model.device

    def __call__(self, input_ids: Any, *, attention_mask: Any, past_key_values: Any, use_cache: bool) -> Any:
        """Logits and cache."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past_key_values or ()):
            cache.update(keys, values, layer)
        out = self._model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=use_cache
        )
        pairs = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
        return SimpleNamespace(logits=out.logits, past_key_values=pairs)


class Compressor:
    """Compresses the chunks of a question to a share of their tokens.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        budget: share of the tokens to keep.

    Raises:
        ConfigError: llmlingua is not installed, or cannot be imported.
    """

    def __init__(self, model: Any, tokenizer: Any, budget: float) -> None:
        try:
            from llmlingua import PromptCompressor
        except (ImportError, OSError) as error:
            raise ConfigError(f"llmlingua cannot be imported ({error}); run: pip install llmlingua") from error

        class WithLocalModel(PromptCompressor):  # type: ignore[misc]
            """The package's class without its loading."""

            def __init__(self) -> None:
                self.model = PairsOfKeysAndValues(model)
                self.tokenizer = self.oai_tokenizer = tokenizer
                self.device = model.device
                self.model_name = str(model.name_or_path)
                self.open_api_config: dict[str, Any] = {}
                self.use_llmlingua2 = False
                self.context_idxs: list[Any] = []
                self.retrieval_model = self.retrieval_model_name = None
                self.cache_bos_num, self.prefix_bos_num = 10, 100
                self.max_position_embeddings = model.config.max_position_embeddings

        self._made = WithLocalModel()
        self._budget = budget

    def request(self, question: Question) -> RagRequest:
        """The question over one chunk: all chunks compressed together, as the package gives them back."""
        told = self._made.compress_prompt(
            [shown(chunk) for chunk in question.chunks],
            question=question.text,
            rate=self._budget,
            concate_question=False,
            rank_method="longllmlingua",
            condition_in_question="after",
            condition_compare=True,
            reorder_context="original",
        )
        return RagRequest(query=question.text, chunks=(Chunk(id="compressed", text=str(told["compressed_prompt"])),))
