"""Both runs of one prompt: the full one with the pruned one beside it, and the engine's own pruned run."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from entroprefill_rag.diagnosis.heads import Floats
from entroprefill_rag.diagnosis.paired import LayerStep, PairedRun, distances, norms, tensor_of, tolerance
from entroprefill_rag.engine.backend import LocalBackend
from entroprefill_rag.engine.run import PrefillRun, RowReader
from entroprefill_rag.engine.tap import ACTIVE_RUN
from entroprefill_rag.errors import ConfigError, EntroPrefillError
from entroprefill_rag.prompt import PromptLayout


@dataclass(frozen=True)
class SideBySide:
    """Both runs of one prompt.

    Attributes:
        layer: the last layer with all tokens.
        eta: ``[H_Q, n']`` discarded mass of the retained rows at that layer.
        steps: the layers above.
        full_logits: ``[vocabulary]`` float64, next token of the full run.
        pruned_logits: likewise of the engine's pruned run.
        full_last: last state of the last token before the final norm, ``[hidden]``.
        pruned_last: likewise of the pruned run.
        epsilon: rounding unit of the states' type.
    """

    layer: int
    eta: Floats
    steps: tuple[LayerStep, ...]
    full_logits: Floats
    pruned_logits: Floats
    full_last: Tensor
    pruned_last: Tensor
    epsilon: float


def run_side_by_side(backend: LocalBackend, layout: PromptLayout, layer: int, kept: Tensor) -> SideBySide:
    """Run a prompt in full with the pruned layers beside it, then through the engine with the same tokens removed.

    Cost: one full prefill, the layers above ``layer`` twice on retained tokens, all attention rows of the retained
    tokens once more in float32, and one pruned prefill.

    Args:
        backend: its prefill turn is held meanwhile.
        layout: the prompt.
        layer: the last layer with all tokens.
        kept: ascending positions of retained tokens, int64 ``[n']``, on the CPU; the last token among them.

    Raises:
        ConfigError: the model cannot be pruned, or its attention is more than heads and an output projection.
        EntroPrefillError: the engine's pruned run is not the one computed here: a bug.
    """
    anatomy = backend.anatomy
    if anatomy.why_not is not None:
        raise ConfigError(anatomy.why_not.message)
    pair = PairedRun(anatomy, layout.n_tokens, layer, kept)
    pruned = PrefillRun(anatomy, layout.n_tokens, _Forced(layer, kept), torch.zeros(layout.n_tokens, 1))
    if pair.is_ragged_window(layer):
        raise ConfigError(
            f"{anatomy.kernel!r} counts sliding windows by index, which after pruning is not position; load the model "
            "with attn_implementation='sdpa'"
        )
    with backend._prefill_turn, torch.inference_mode():
        with pair.watching():
            full_logits, full_last = _forward(backend, layout, pair)
        pruned_logits, pruned_last = _forward(backend, layout, pruned)
    if pruned.refusal is not None:
        raise ConfigError(f"this prompt cannot be pruned: {pruned.refusal.message}")
    if pair.eta is None or pair.pruned is None:
        raise ConfigError(f"attention of layer {layer} was not seen: the model did not call its registered kernel")
    epsilon = float(torch.finfo(full_last.dtype).eps)
    _check_same(pair.pruned[0, -1], pruned_last, epsilon)
    return SideBySide(
        layer=layer,
        eta=pair.eta,
        steps=tuple(pair.steps),
        full_logits=full_logits,
        pruned_logits=pruned_logits,
        full_last=full_last,
        pruned_last=pruned_last,
        epsilon=epsilon,
    )


@dataclass(frozen=True)
class _Forced:
    """A monitor that removes what it is told to."""

    layer: int
    kept: Tensor

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.layer,)

    def observe(self, layer: int, read: RowReader) -> Any:
        return SimpleNamespace(accepted=True, kept_tokens=self.kept)


def _forward(backend: LocalBackend, layout: PromptLayout, run: PrefillRun) -> tuple[Floats, Tensor]:
    """The model's own forward under ``run``: next-token logits, and the last state of the last token."""
    ids, mask = backend._inputs(layout)
    model, states = backend.model, list[Tensor]()

    def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if ACTIVE_RUN.get() is run and not (isinstance(run, PairedRun) and run.beside):
            states.append(tensor_of(output)[0, -1])

    # Without a configuration, no layer of the cache forgets what leaves its window.
    takes = inspect.signature(backend.anatomy.decoder.forward).parameters
    arguments: dict[str, Any] = {"cache" if "cache" in takes else "past_key_values": DynamicCache()}
    keeps = getattr(model, "_supports_logits_to_keep", None)
    if callable(keeps) and keeps():
        arguments["logits_to_keep"] = 1
    handle = backend.anatomy.layers[-1].register_forward_hook(keep)
    try:
        with backend._installation.activate(run):
            output = model(input_ids=ids, attention_mask=mask, use_cache=True, **arguments)
    finally:
        handle.remove()
    return np.asarray(output.logits[0, -1].float().cpu().double().numpy()), states[-1]


def _check_same(ours: Tensor, engine: Tensor, epsilon: float) -> None:
    apart = float(distances(ours[None, None], engine[None, None]).max())
    if apart > tolerance(epsilon) * float(norms(engine[None, None]).max()):
        raise EntroPrefillError(
            f"internal: the engine's pruned run ends {apart:.3g} away from the layers run one by one; please report "
            "this with the name of the model"
        )
