"""A full run that takes the pruned run along, one layer at a time.

While the model's own forward runs in full, each layer above the pruned one is called twice more, as the engine calls
it after pruning (on retained tokens, at their original positions): on the full run's retained states, ``F_j^R(x)``, and
on the pruned run's. So the three terms of the conditional bound are seen on the very states that it speaks of
(section 8, correction 2), and no state of an earlier layer is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from entroprefill_rag.diagnosis.heads import (
    AttentionInputs,
    Floats,
    HeadRows,
    head_factors,
    output_projection,
    read_heads,
)
from entroprefill_rag.engine.families import Anatomy
from entroprefill_rag.engine.gather import TokenGather, find_cache, unknown_token_arguments
from entroprefill_rag.engine.run import PrefillRun
from entroprefill_rag.engine.tap import ACTIVE_RUN
from entroprefill_rag.errors import ConfigError


@dataclass(frozen=True)
class LayerStep:
    """What one layer above the pruned one did to the retained tokens. Distances are l2, per token, ``[n']``.

    Attributes:
        layer: its number.
        before: distance of the two runs before it.
        after: distance of the two runs after it.
        stretched: ``||F_j^R(x_full) - F_j^R(x_pruned)||``.
        added: ``||F_j(x_full) - F_j^R(x_full)||``.
        attention: the same difference at the attention module's output.
        norms: of the full run's states after it.
        size: largest norm of any state involved, for the size of rounding.
        heads: its attention rows in the full run.
    """

    layer: int
    before: Floats
    after: Floats
    stretched: Floats
    added: Floats
    attention: Floats
    norms: Floats
    size: Floats
    heads: HeadRows


class PairedRun(PrefillRun):
    """A full run that takes the pruned one along. Nothing of the full run is changed."""

    def __init__(self, anatomy: Anatomy, n_tokens: int, layer: int, kept: Tensor) -> None:
        super().__init__(anatomy, n_tokens)
        self.first = layer
        self.kept = kept
        self.eta: Floats | None = None
        self.steps: list[LayerStep] = []
        self.pruned: Tensor | None = None
        self._cut = TokenGather(kept, n_tokens)
        self.beside = False
        self._cache: Cache | None = None
        self._inputs: AttentionInputs | None = None
        self._attention: dict[bool, Tensor] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on the layers from ``first`` on, silent for every other run; off again at the end."""
        handles: list[Any] = []
        try:
            for layer in range(self.first, len(self.anatomy.layers)):
                attention, module = self.anatomy.attentions[layer], self.anatomy.layers[layer]
                handles.append(attention.register_forward_hook(self._after_attention))
                handles.append(module.register_forward_pre_hook(self._before_layer, with_kwargs=True))
                if layer > self.first:
                    handles.append(module.register_forward_hook(self._after_layer(layer), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    # -- what the engine's hooks and tap ask ----------------------------------------------------------------------

    def enter_layer(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A full run leaves every layer's arguments alone."""

    def wants(self, attention: nn.Module) -> bool:
        """Every layer from the pruned one on is read, in the full run."""
        layer = getattr(attention, "layer_idx", None)
        return (
            not self.beside
            and isinstance(layer, int)
            and layer >= self.first
            and attention is self.anatomy.attentions[layer]
        )

    def is_compacted(self, attention: nn.Module) -> bool:
        """Whether this attention call is one of those beside the full run."""
        return self.beside

    def read(
        self, attention: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: Mapping[str, Any]
    ) -> None:
        """Keep what the kernel is about to use; the cache has the values already."""
        layer = int(attention.layer_idx)  # type: ignore[arg-type]
        value = getattr(self._cache.layers[layer], "values", None) if self._cache is not None else None
        if not isinstance(value, Tensor) or value.shape[:3] != key.shape[:3]:
            raise ConfigError(f"layer {layer} does not put its values into the cache, so they cannot be measured")
        self._inputs = AttentionInputs(query, key, value, mask, dict(kwargs))
        if layer == self.first:
            self.eta = read_heads(self._inputs, self.kept, None, window=self.anatomy.windows[layer]).eta

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _before_layer(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if ACTIVE_RUN.get() is self and not self.beside:
            self._cache = find_cache(kwargs)

    def _after_attention(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if ACTIVE_RUN.get() is self:
            self._attention[self.beside] = tensor_of(output)

    def _after_layer(self, layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if ACTIVE_RUN.get() is self and not self.beside:
                self._step(layer, module, args, kwargs, tensor_of(output))

        return hook

    def _step(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if unknown := unknown_token_arguments(kwargs, self.n_tokens):
            raise ConfigError(f"layer {layer} takes {', '.join(unknown)}, unknown to the gather; it cannot be pruned")
        inputs, full_attention = self._inputs, self._attention.pop(False)
        if inputs is None:
            raise ConfigError(f"attention of layer {layer} was not seen: the model did not call its registered kernel")
        states = self._cut.hidden(args[0] if args else kwargs["hidden_states"])
        before = states if self.pruned is None else self.pruned.to(states.device)
        own, own_attention = self._call(module, args, kwargs, states)
        pruned, _ = self._call(module, args, kwargs, before)
        after = self._cut.hidden(output)
        heads = self._heads(layer, inputs, own_attention)
        self.steps.append(
            LayerStep(
                layer=layer,
                before=distances(states, before),
                after=distances(after, pruned),
                stretched=distances(own, pruned),
                added=distances(after, own),
                attention=distances(self._cut.hidden(full_attention), own_attention),
                norms=norms(after),
                size=np.maximum.reduce([norms(one) for one in (states, before, after, own, pruned)]),
                heads=heads,
            )
        )
        self.pruned, self._inputs = pruned, None

    def _call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer on retained tokens: its output, and that of its attention module."""
        given = {
            name: None if isinstance(value, Cache) else value for name, value in self._cut.arguments(kwargs).items()
        }
        if "use_cache" in given:
            given["use_cache"] = False
        self.beside = True
        try:
            output = module(states, *args[1:], **given) if args else module(**{**given, "hidden_states": states})
        finally:
            self.beside = False
        return tensor_of(output), self._attention.pop(True)

    def _heads(self, layer: int, inputs: AttentionInputs, own_attention: Tensor) -> HeadRows:
        heads, size = inputs.query.shape[1], inputs.value.shape[-1]
        projection = output_projection(self.anatomy.attentions[layer], heads * size)
        factors = head_factors(projection, heads, size, inputs.value)
        rows = read_heads(inputs, self.kept, factors, window=self.anatomy.windows[layer])
        if rows.outputs is None:
            raise RuntimeError("rows were read without their outputs")
        _check_projection(layer, projection(rows.outputs.to(inputs.value.dtype)[None]), own_attention)
        return rows


def _check_projection(layer: int, expected: Tensor, seen: Tensor) -> None:
    worst = float(distances(expected, seen).max())
    if worst > tolerance(float(torch.finfo(seen.dtype).eps)) * float(norms(seen).max()):
        raise ConfigError(
            f"layer {layer}: its attention module gives {worst:.3g} else than its heads' outputs through its output "
            "projection, so value norms there mean nothing; this architecture cannot be diagnosed"
        )


def tolerance(epsilon: float) -> float:
    return max(1e-4, 10.0 * epsilon)


def tensor_of(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple) else output
    if not isinstance(found, Tensor):
        raise ConfigError(f"a layer gave {type(found).__name__} where hidden states were expected")
    return found


def distances(first: Tensor, second: Tensor) -> Floats:
    """l2 per token, ``[1, n', hidden]`` twice -> ``[n']``."""
    return np.asarray((first.float() - second.to(first.device).float())[0].cpu().double().norm(dim=-1).numpy())


def norms(states: Tensor) -> Floats:
    return np.asarray(states[0].float().cpu().double().norm(dim=-1).numpy())
