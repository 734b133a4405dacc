"""Tiny models of all families with a prompt written down, and both runs of it computed another way.

The other way is that of ``oracle.py``: full sequences with masks written out; nothing is gathered. States are taken by
hooks of the tests on a model that the engine never touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from families_for_tests import FAMILIES, LONG, build, shared
from oracle import allowed_pairs, as_layer_mask, masked_full_run
from tiny import tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from entroprefill_rag import Chunk, LocalBackend, PruningConfig, RagRequest
from entroprefill_rag.prompt import PromptLayout

REMOVED = ("c1", "c3")
GONE = LONG.tokens_of((1, 3))
KEPT = [position for position in range(LONG.n) if position not in GONE]
ASKED = RagRequest(query="?", chunks=[Chunk(id=f"c{i}", text="-") for i in range(len(LONG.chunks))])
LAYOUT = PromptLayout(
    input_ids=tuple(LONG.ids),
    chunk_ids=tuple(f"c{i}" for i in range(len(LONG.chunks))),
    chunk_spans=LONG.chunks,
    protected=tuple(all(not start <= i < end for start, end in LONG.chunks) for i in range(LONG.n)),
    protected_reasons=(None,) * len(LONG.chunks),
    sink_tokens=2,
    suffix_span=(LONG.chunks[-1][1], LONG.n),
    rendered="",
)


class FixedPrompt(LocalBackend):
    """A backend whose every request is the same prompt of random tokens: these models have no words."""

    def layout(
        self, request: RagRequest, config: PruningConfig | None = None, *, max_new_tokens: int = 1
    ) -> PromptLayout:
        return LAYOUT


def backend(name: str, kernel: str) -> FixedPrompt:
    """A backend on a new model of family ``name``."""
    return FixedPrompt(build(name, kernel), tokenizer(), name=name)


def first_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def taken(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Outputs of the modules, in the order they come."""
    found: list[Tensor] = []
    handles = [module.register_forward_hook(lambda _m, _a, out: found.append(first_of(out)[0])) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Reference:
    """Both runs of the prompt, from the oracle.

    Attributes:
        full: states leaving each layer, ``[layers][n, hidden]``.
        pruned: likewise with the tokens hidden above the layer.
        full_logits: of the last position.
        pruned_logits: likewise.
    """

    full: list[Tensor]
    pruned: list[Tensor]
    full_logits: Tensor
    pruned_logits: Tensor

    def distance(self, layer: int) -> Tensor:
        """l2 per retained token after ``layer``, ``[n']``."""
        return (self.full[layer] - self.pruned[layer])[KEPT].double().norm(dim=-1)


def reference(name: str, kernel: str, layer: int) -> Reference:
    """Both runs of the prompt on an untouched model."""
    model, windows = shared(name, kernel), FAMILIES[name].windows
    with taken(model.model.layers) as full:
        full_logits = masked_full_run(model, LONG.ids, windows, layer)[-1]
    with taken(model.model.layers) as pruned:
        pruned_logits = masked_full_run(model, LONG.ids, windows, layer, GONE)[-1]
    return Reference(full, pruned, full_logits, pruned_logits)


def layer_on_retained_keys(name: str, kernel: str, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer of the full run, called again with the removed keys masked: nothing is gathered.

    Returns:
        Its output and its attention module's in the full run, then both with masked keys, ``[n', hidden]`` each.
    """
    model, window = shared(name, kernel), FAMILIES[name].windows[layer]
    module: Any = model.model.layers[layer]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        with taken([module, module.self_attn]) as full:
            masked_full_run(model, LONG.ids, FAMILIES[name].windows, layer)
    finally:
        handle.remove()
    args, kwargs = calls[-1]
    pairs = allowed_pairs(LONG.n, window, GONE)
    with torch.no_grad(), taken([module, module.self_attn]) as masked:
        module(*args, **{**kwargs, "attention_mask": as_layer_mask(pairs, kernel)})
    # The attention module ends before its layer does.
    return full[1][KEPT], full[0][KEPT], masked[1][KEPT], masked[0][KEPT]


def hooks_on(model: PreTrainedModel) -> int:
    """Forward hooks and pre-hooks on all modules."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
