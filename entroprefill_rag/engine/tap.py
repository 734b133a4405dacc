"""Reads the wanted rows of attention at a monitored layer, and only there, while the model runs its own kernel.

An attention function is registered under a name of its own (``entroprefill_sdpa`` for ``sdpa``). It hands the query
and key that the layer is about to use (after rotation, after q/k-norm) to the active run, then calls the model's own
function, untouched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from entroprefill_rag.engine.families import PREFIX
from entroprefill_rag.rule.masses import RowMasses, chunk_masses

if TYPE_CHECKING:
    from entroprefill_rag.engine.run import PrefillRun

ACTIVE_RUN: ContextVar[PrefillRun | None] = ContextVar("entroprefill_active_run", default=None)

# One float32 block of attention rows: bounds the tap's memory whatever the number of rows.
BLOCK_ELEMENTS = 1 << 22
BLOCK_ROWS = 32


def register_tap(kernel: str) -> str:
    """Register the reading twin of attention function ``kernel`` and of its mask function; returns its name."""
    name = PREFIX + kernel
    AttentionInterface.register(name, partial(_read_then_attend, kernel))
    masks = AttentionMaskInterface()
    if kernel in masks:
        # A kernel without a mask function of its own gets no mask from transformers; so must its twin.
        AttentionMaskInterface.register(name, masks[kernel])
    return name


def _own_function(kernel: str, module: nn.Module) -> Callable[..., Any]:
    # "eager" is a function of each modelling file, and a file may override registry entries for itself.
    home = sys.modules[type(module).__module__]
    if kernel == "eager":
        own: Callable[..., Any] = home.eager_attention_forward
        return own
    registry = getattr(home, "ALL_ATTENTION_FUNCTIONS", None)
    registered: Callable[..., Any] = (registry if registry is not None else AttentionInterface())[kernel]
    return registered


class _AsLoaded:
    """The attention module as it was before the tap was installed: the same, with the kernel's own name.

    Flash attention reads the name of the kernel to load from the module's configuration.
    """

    def __init__(self, module: nn.Module, kernel: str) -> None:
        self._module = module
        self.config = _ConfigAsLoaded(module.config, kernel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _ConfigAsLoaded:
    def __init__(self, config: Any, kernel: str) -> None:
        self._config = config
        self._attn_implementation = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _read_then_attend(
    kernel: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    run = ACTIVE_RUN.get()
    view: Any = module
    if "flash" in kernel:
        view = _AsLoaded(module, kernel)
        if run is not None and run.is_compacted(module):
            # Original positions have gaps after pruning, which flash attention takes for packed sequences.
            kwargs.pop("position_ids", None)
    if run is not None:
        run.attending(module, key, value)
        if run.wants(module):
            run.read(module, query, key, attention_mask, kwargs)
        elif run.decodes(module):
            run.read_appended(query, key, attention_mask, kwargs)
    return _own_function(kernel, module)(view, query, key, value, attention_mask, *args, **kwargs)


def read_rows(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    membership: Tensor,
    *,
    scaling: float,
    attention_mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    tokens: bool = False,
    first: int = 0,
) -> RowMasses:
    """Masses of the given attention rows on every chunk (algorithm, section 2).

    The softmax runs in float32 over the keys that the layer's own mask allows: the mask's rows where there is one, else
    causality and the window. A learned sink logit counts in the denominator.

    Peak extra memory, in bytes, with ``r = H_Q / G`` heads per group, ``b <= BLOCK_ROWS`` rows per block (where more
    than one, ``r * b * n <= BLOCK_ELEMENTS``) and head size ``d``: ``12 * r * b * n + 4 * n * d + 4 * H_Q * R * k``,
    plus ``4 * H_Q * n`` for the tokens where asked, plus ``4 * n * k`` for the membership. Nothing grows with
    ``n * n``.

    Args:
        query: ``[1, H_Q, n - first, d]``, as the kernel gets it.
        key: ``[1, G, n, d]``, likewise.
        rows: places of the rows to read among the keys, int64 ``[R]``, on the CPU.
        membership: 0/1 float32 ``[n, k]``, which token belongs to which chunk (sinks left out).
        scaling: the layer's own factor on the logits.
        attention_mask: None, ``[1, 1 or H_Q, n - first, n]`` boolean or additive, or a padding mask ``[1, n]``.
        window: sliding window in tokens.
        softcap: the layer's soft-cap on logits.
        sink_logits: learned sink logit per head, ``[H_Q]``.
        tokens: whether the mean row per token is wanted too.
        first: place of the first query among the keys: the keys before it come from a cache.

    Returns:
        Row masses on the CPU: chunks float64 ``[H_Q, R, k]``; tokens float32 ``[H_Q, n]`` or None.
    """
    heads, n = query.shape[1], key.shape[2]
    groups = key.shape[1]
    per_group = heads // groups
    masses = query.new_empty((heads, rows.numel(), membership.shape[1]), dtype=torch.float32)
    mean = query.new_zeros((heads, n), dtype=torch.float32) if tokens else None
    block = max(1, min(BLOCK_ROWS, BLOCK_ELEMENTS // (per_group * n)))
    # Rows are positions known on the host. In ascending order, each block needs no key after its last row.
    for part in rows.sort().indices.split(block):
        positions = rows[part].to(query.device)
        limit = int(rows[part[-1]]) + 1
        hidden = hidden_keys(positions, limit, attention_mask, window, first)
        for group in range(groups):
            span = slice(group * per_group, (group + 1) * per_group)
            keys = key[0, group, :limit].float().transpose(0, 1)
            logits = torch.matmul(query[0, span].index_select(1, positions - first).float(), keys).mul_(scaling)
            weights = softmax_rows(
                logits,
                hidden[span] if hidden.shape[0] > 1 else hidden,
                softcap=softcap,
                sink_logits=None if sink_logits is None else sink_logits[span],
            )
            # A row that may attend to nothing (left padding) has no masses.
            weights.nan_to_num_(nan=0.0)
            masses[span, part.to(query.device)] = chunk_masses(weights, membership[:limit]).to(masses.dtype)
            if mean is not None:
                mean[span, :limit] += weights.sum(dim=1)
    if mean is not None:
        mean /= max(1, rows.numel())
    return RowMasses(chunks=masses.double().cpu(), tokens=None if mean is None else mean.cpu())


def softmax_rows(logits: Tensor, hidden: Tensor | None, *, softcap: float | None, sink_logits: Tensor | None) -> Tensor:
    """Scaled logits as the layer turns them into probabilities; a sink logit counts in the denominator only.

    Args:
        logits: ``[heads, rows, keys]`` float32; overwritten.
        hidden: what the rows may not see, ``[1 or heads, rows, keys]`` boolean or additive; None where nothing.
        softcap: the layer's soft-cap on logits.
        sink_logits: learned sink logit per head, ``[heads]``.
    """
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None and hidden.dtype == torch.bool:
        logits.masked_fill_(hidden, float("-inf"))
    elif hidden is not None:
        logits.add_(hidden)
    if sink_logits is None:
        return logits.softmax(dim=-1)
    extra = sink_logits.float().reshape(-1, 1, 1).expand(-1, logits.shape[1], 1)
    return torch.cat([logits, extra], dim=-1).softmax(dim=-1)[..., :-1].contiguous()


def hidden_keys(positions: Tensor, limit: int, mask: Tensor | None, window: int | None, first: int) -> Tensor:
    """What the rows may not see: boolean or additive, ``[1 or H_Q, rows, limit]``."""
    if mask is not None and mask.dim() == 4:
        rows = mask[0].index_select(1, (positions - first).to(mask.device))[..., :limit].to(positions.device)
        return ~rows if rows.dtype == torch.bool else rows.float()
    keys = torch.arange(limit, device=positions.device)
    hidden = keys[None, :] > positions[:, None]
    if window is not None:
        hidden |= keys[None, :] <= positions[:, None] - window
    if mask is not None:
        hidden |= ~mask[:1, :limit].bool().to(positions.device)
    return hidden[None]
