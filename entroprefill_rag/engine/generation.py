"""What a caller's generation arguments mean for pruning: passed through, answered in full, or refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from transformers import GenerationConfig

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.record import Reason

DEFAULT_MAX_NEW_TOKENS = 256

_OURS = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "past_key_values", "cache", "position_ids")
_DYNAMIC = (None, "dynamic", "dynamic_full")


def check_arguments(generation: Mapping[str, Any]) -> None:
    """Refuse arguments that would replace the prompt or the number of answers.

    Raises:
        ConfigError: one of them was given, or a length that is no number of tokens.
    """
    for name in ("max_new_tokens", "max_length"):
        value = generation.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
            raise ConfigError(f"{name} must be a whole number of tokens, at least 1, got {value!r}")
    taken = [name for name in _OURS if generation.get(name) is not None]
    if taken:
        raise ConfigError(f"{', '.join(taken)} cannot be passed: the prompt and its cache are made from the request")
    if int(generation.get("num_return_sequences") or 1) != 1:
        raise ConfigError(
            f"num_return_sequences={generation['num_return_sequences']} is not supported: one request gives one "
            "answer; call generate once per answer"
        )


def effective(model: Any, generation: Mapping[str, Any]) -> GenerationConfig:
    """The generation configuration that ``generate`` will work with, defaults of the model included."""
    base = generation.get("generation_config") or getattr(model, "generation_config", None) or GenerationConfig()
    config = copy.deepcopy(base)
    config.update(**{key: value for key, value in generation.items() if key != "generation_config"})
    return config


def new_tokens(config: GenerationConfig, generation: Mapping[str, Any], prompt_tokens: int = 0) -> int:
    """Most tokens that will be generated; ours is the default where neither the caller nor the model says."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if generation.get("max_length") is not None:
        return max(1, int(generation["max_length"]) - prompt_tokens)
    return DEFAULT_MAX_NEW_TOKENS


def why_full(config: GenerationConfig, generation: Mapping[str, Any]) -> Reason | None:
    """None where the decoding mode goes with a pruned cache, else why the prompt is prefilled in full."""
    mode = str(config.get_generation_mode(generation.get("assistant_model")).value)
    if mode not in ("greedy_search", "sample"):
        return Reason(
            code="generation_mode",
            message=f"Decoding by {mode} reorders or rolls back the cache; pruning needs greedy search or sampling.",
        )
    if config.use_cache is False:
        return Reason(code="no_cache", message="use_cache=False reads the whole prompt again for every token.")
    if getattr(config, "cache_implementation", None) not in _DYNAMIC:
        return Reason(
            code="cache_implementation",
            message=f"A {config.cache_implementation!r} cache has one length for all layers; pruning needs 'dynamic'.",
        )
    if getattr(config, "prefill_chunk_size", None) is not None:
        return Reason(code="prompt_split", message="prefill_chunk_size splits the prompt over several forwards.")
    if getattr(config, "guidance_scale", None) not in (None, 1, 1.0):
        return Reason(code="guidance", message="Classifier-free guidance runs a second prompt through the model.")
    if generation.get("custom_generate") is not None:
        return Reason(code="custom_generate", message="custom_generate replaces the decoding loop.")
    return None


def finish_reason(
    generated: list[int], config: GenerationConfig, most: int, cancelled: bool, drifted: bool = False
) -> Any:
    """Why a generation ended: 'stop', 'length', 'cancelled', or 'drift' where one was to end it."""
    if cancelled:
        return "cancelled"
    if drifted:
        return "drift"
    ends = config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if generated and generated[-1] in ends:
        return "stop"
    return "length" if len(generated) >= most else "stop"
