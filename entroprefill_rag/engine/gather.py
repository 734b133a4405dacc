"""Runs deeper layers on retained tokens only: what a layer is given, cut down to them, at their original positions.

Reference semantics (algorithm, section 7): the result equals a full run in which, at layers above the accepted one, no
token may attend to a removed one. Windows there are windows of original positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, QuantizedLayer

# Which axes of a layer's keyword arguments run over tokens. Names by prefix: 4.57 passes Gemma 3 its rotary embeddings
# as position_embeddings_global and position_embeddings_local.
_TOKEN_AXES: Mapping[str, tuple[int, ...]] = {
    "position_embeddings": (-2,),
    "position_ids": (-1,),
    "cache_position": (-1,),
}


class TokenGather:
    """Cuts the arguments of one prefill down to the retained tokens.

    Layers share their masks and rotary embeddings, so each tensor is gathered once per run and device.

    Args:
        kept: ascending positions of the retained tokens, int64 ``[n']``, on the CPU.
        n_tokens: length ``n`` of the full prompt.
    """

    def __init__(self, kept: Tensor, n_tokens: int) -> None:
        self.kept = kept
        self.n_tokens = n_tokens
        self._on_device: dict[torch.device, Tensor] = {torch.device("cpu"): kept}
        # Keyed by id; the source is held, so that the id stays its own while the entry lives.
        self._done: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    def index(self, device: torch.device) -> Tensor:
        """The retained positions on ``device``."""
        if device not in self._on_device:
            self._on_device[device] = self.kept.to(device)
        return self._on_device[device]

    def hidden(self, states: Tensor) -> Tensor:
        """Hidden states ``[1, n, hidden]`` -> ``[1, n', hidden]``."""
        return states.index_select(1, self.index(states.device))

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of a decoder layer, every token axis gathered; the rest is passed through untouched."""
        return {name: self._argument(name, value) for name, value in kwargs.items()}

    def release(self) -> None:
        """Forget the prefill's tensors."""
        self._done.clear()

    def _argument(self, name: str, value: Any) -> Any:
        if name == "attention_mask" and isinstance(value, Tensor):
            return self._take(value, (-2, -1) if value.dim() == 4 else (-1,))
        for prefix, axes in _TOKEN_AXES.items():
            if name.startswith(prefix):
                if isinstance(value, Tensor):
                    return self._take(value, axes)
                if isinstance(value, tuple | list):
                    return tuple(self._take(part, axes) if isinstance(part, Tensor) else part for part in value)
        return value

    def _take(self, source: Tensor, axes: tuple[int, ...]) -> Tensor:
        key = (id(source), axes)
        if key not in self._done:
            result = source
            for axis in axes:
                if result.shape[axis] == self.n_tokens:
                    result = result.index_select(axis, self.index(result.device))
            self._done[key] = (source, result)
        return self._done[key][1]


def unknown_token_arguments(kwargs: Mapping[str, Any], n_tokens: int) -> list[str]:
    """Names of a layer's tensor arguments that seem to run over tokens and that nobody here knows how to gather.

    A model with such an argument is not pruned: a wrong guess would be silently wrong.
    """
    known = ("attention_mask", *_TOKEN_AXES)
    return sorted(
        name
        for name, value in kwargs.items()
        if isinstance(value, Tensor) and n_tokens in value.shape and not name.startswith(known)
    )


def find_cache(kwargs: Mapping[str, Any]) -> Cache | None:
    """The KV cache among a layer's arguments, whatever its name in this version of transformers."""
    return next((value for value in kwargs.values() if isinstance(value, Cache)), None)


def why_cache_cannot_be_ragged(cache: Cache | None) -> str | None:
    """None where each layer of ``cache`` may hold its own number of tokens, else what is in the way."""
    if cache is None:
        return "without a cache, decoding reads the whole prompt again at every layer"
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or isinstance(layer, QuantizedLayer):
            return f"the cache has a {type(layer).__name__}, which does not grow layer by layer"
    return None


def stored_tokens(cache: Cache | None, layer: int) -> int:
    """Tokens that ``layer`` holds in the cache."""
    if cache is None or layer >= len(cache.layers):
        return 0
    keys = getattr(cache.layers[layer], "keys", None)
    return int(keys.shape[-2]) if isinstance(keys, Tensor) and keys.dim() == 4 else 0


def append_mask(
    keys: Tensor,
    queries: Tensor,
    *,
    window: int | None,
    padding: Tensor | None,
    given: Tensor | None,
    kernel: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Mask of tokens that are appended to a ragged cache: one layer, original positions.

    The mask that the model built is sized from a layer that may hold more (or other) keys, so it is made anew.

    Args:
        keys: original positions of all keys this layer attends to, int64 ``[S]``, on the CPU.
        queries: original positions of the new tokens, int64 ``[q]``, on the CPU.
        window: sliding window of the layer.
        padding: boolean ``[total]`` on the CPU, False where a position is padding; None where nothing is.
        given: the mask that the model passed.
        kernel: attention implementation, for the form of the mask.
        dtype: type of the hidden states, for additive masks.
        device: where the mask goes.

    Returns:
        None where the kernel needs none, else ``[1, 1, q, S]`` boolean or additive, or ``[1, S]`` for flash attention.
    """
    visible = padding[keys] if padding is not None else None
    if "flash" in kernel:
        return None if visible is None or bool(visible.all()) else visible[None].to(device)
    allowed = keys[None, :] <= queries[:, None]
    if window is not None:
        allowed &= keys[None, :] > queries[:, None] - window
    if visible is not None:
        allowed &= visible[None, :]
    additive = kernel == "eager" or (given is not None and given.is_floating_point())
    if not additive and queries.numel() == 1 and bool(allowed.all()):
        return None
    mask = allowed[None, None].to(device)
    if not additive:
        return mask
    return torch.zeros((), dtype=dtype, device=device).where(mask, torch.finfo(dtype).min)
