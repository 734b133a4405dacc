"""What a model must have so that it can be pruned in mid-prefill; says why not where it has not.

Nothing here knows a model family by name: what counts is structure. A decoder with a list of layers, an attention
module in each that goes through the attention registry, one KV cache entry per layer, positions by rotation (or
none), and windows that are declared.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from entroprefill_rag.record import Reason
from entroprefill_rag.rule.cost import ModelShape

PREFIX = "entroprefill_"
_ATTENTION_NAMES = ("self_attn", "attention", "attn")
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model that pruning touches.

    Attributes:
        decoder: the module whose forward runs the layer loop.
        layers: its decoder layers, in order.
        attentions: the attention module of each layer; empty where `why_not` is set.
        windows: sliding window of each layer in tokens, None for full attention.
        query_heads: H_Q.
        kv_heads: G, the number of GQA groups.
        kernel: the model's own attention implementation, e.g. "sdpa".
        why_not: None, or why this model cannot be pruned.
    """

    decoder: nn.Module
    layers: tuple[nn.Module, ...]
    attentions: tuple[nn.Module, ...]
    windows: tuple[int | None, ...]
    query_heads: int
    kv_heads: int
    kernel: str
    why_not: Reason | None

    @property
    def config(self) -> Any:
        """Configuration of the decoder (the text part of a multimodal model)."""
        return self.decoder.config

    @property
    def materialises_masks(self) -> bool:
        """Whether the kernel takes an explicit mask, so that windows can follow original positions."""
        return self.kernel in ("sdpa", "eager")


def inspect(model: nn.Module) -> Anatomy:
    """Find the parts of ``model`` that pruning touches.

    Args:
        model: a causal language model of transformers, possibly wrapped (PEFT) or multimodal.

    Returns:
        The anatomy; ``why_not`` is set instead of raising, since such a model still answers in full.
    """
    decoder = _decoder(model)
    config = decoder.config
    layers = tuple(getattr(decoder, "layers", None) or ())
    attentions = tuple(attention for layer in layers if (attention := _attention(layer)) is not None)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    kernel = str(getattr(config, "_attn_implementation", None) or "eager").removeprefix(PREFIX)
    return Anatomy(
        decoder=decoder,
        layers=layers,
        attentions=attentions,
        windows=tuple(_window(attention, config) for attention in attentions),
        query_heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        kernel=kernel,
        why_not=_why_not(model, decoder, layers, attentions, kernel),
    )


def _decoder(model: nn.Module) -> nn.Module:
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else model
    return decoder if isinstance(decoder, nn.Module) else model


def _attention(layer: nn.Module) -> nn.Module | None:
    for name in _ATTENTION_NAMES:
        candidate = getattr(layer, name, None)
        if isinstance(candidate, nn.Module) and isinstance(getattr(candidate, "layer_idx", None), int):
            return candidate
    return None


def _window(attention: nn.Module, config: Any) -> int | None:
    types = getattr(config, "layer_types", None)
    if types is not None:
        if types[attention.layer_idx] != "sliding_attention":
            return None
        window = getattr(attention, "sliding_window", None) or getattr(config, "sliding_window", None)
    elif hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        window = getattr(config, "sliding_window", None)
    return int(window) if window else None


def _why_not(
    model: nn.Module, decoder: nn.Module, layers: tuple[nn.Module, ...], attentions: tuple[nn.Module, ...], kernel: str
) -> Reason | None:
    config = decoder.config

    def no(code: str, message: str) -> Reason:
        return Reason(code=f"model_{code}", message=f"{type(model).__name__} cannot be pruned: {message}")

    if getattr(config, "is_encoder_decoder", False):
        return no("encoder_decoder", "it is an encoder-decoder; only decoders read the prompt layer by layer")
    if len(layers) < 3:
        return no("no_layers", f"its decoder shows {len(layers)} layers under `.layers`; at least 3 are needed")
    if len(attentions) != len(layers):
        missing = len(layers) - len(attentions)
        return no("mixed_layers", f"{missing} of its {len(layers)} layers have no attention module with a layer index")
    if [attention.layer_idx for attention in attentions] != list(range(len(layers))):
        return no("layer_order", "its layers are not numbered 0, 1, 2, ... in order")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown:
        return no("layer_types", f"layers of type {', '.join(unknown)} keep a state that tokens cannot be taken out of")
    if getattr(config, "num_kv_shared_layers", 0):
        return no("shared_kv", "some of its layers read the KV cache of another layer")
    if getattr(config, "use_bidirectional_attention", False):
        return no("bidirectional", "its attention is not causal")
    if not getattr(type(decoder), "_supports_attention_backend", False):
        return no("no_registry", "its attention does not go through transformers' attention registry")
    if kernel not in ("sdpa", "eager") and "flash" not in kernel:
        return no("kernel", f"attention kernel {kernel!r} cannot be read; load it with sdpa, eager or flash attention")
    return None


def fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """Hash of configuration and tokenizer: same architecture and same tokens. Says nothing of the weights."""
    volatile = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "use_cache"}
    settings: Any = _decoder(model).config
    config = {key: value for key, value in settings.to_dict().items() if key not in volatile}
    vocabulary = tokenizer.get_vocab()
    ordered = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(json.dumps(ordered, ensure_ascii=True).encode())
    digest.update(str(getattr(tokenizer, "chat_template", None)).encode())
    return digest.hexdigest()[:16]


def shape_of(model: nn.Module, anatomy: Anatomy) -> ModelShape:
    """Sizes of the model for the cost model (section 9); a mixture of experts counts the experts a token visits."""
    config: Any = anatomy.config
    hidden, heads = int(config.hidden_size), anatomy.query_heads
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    inner = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    _, dtype = device_and_dtype(model)
    return ModelShape(
        layers=len(anatomy.layers),
        hidden=hidden,
        intermediate=inner * experts,
        query_heads=heads,
        kv_heads=anatomy.kv_heads,
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        vocab=int(config.vocab_size),
        bytes_per_value=dtype.itemsize,
        windows=anatomy.windows,
    )


def monitorable(anatomy: Anatomy, document_block: tuple[int, int], n_tokens: int) -> tuple[int, ...]:
    """Layers that may be monitored: not the first, not the last, and no window shorter than the reach to the documents.

    Args:
        anatomy: the model.
        document_block: half-open token range of all chunks.
        n_tokens: prompt length; the last row must see back to the first chunk.
    """
    reach = n_tokens - document_block[0]
    return tuple(
        layer
        for layer in range(1, len(anatomy.layers) - 1)
        if (window := anatomy.windows[layer]) is None or window >= reach
    )


def default_layers(anatomy: Anatomy, candidates: tuple[int, ...], most: int = 8) -> tuple[int, ...]:
    """Candidates between 45% and 80% of the stack, at most ``most``, evenly spread.

    Earlier layers attend to documents much and find evidence little. Where only a few layers attend globally, each of
    them from a quarter of the stack on is worth a look. Provisional, until profiles per model are measured.
    """
    depth = len(anatomy.layers)
    globally = sum(window is None for window in anatomy.windows)
    first = 0.45 if globally > depth // 2 else 0.25
    picked = [layer for layer in candidates if first * depth <= layer <= 0.8 * depth - 1]
    if len(picked) > most:
        step = (len(picked) - 1) / (most - 1)
        picked = [picked[round(i * step)] for i in range(most)]
    return tuple(picked)


def device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where the model takes its input ids, and the type of its floating-point weights."""
    parameter = next(model.parameters())
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), parameter.dtype)
    device = getattr(model, "device", parameter.device)
    return torch.device(device), floating
