"""One attention layer of a full run, row by row: what its retained rows discard, and how far each head moves for it.

Values are taken through the output projection, ``W_O^h v``: what a head adds to the attention module's output. Only
distances are wanted of them, so ``W_O^h = Q R`` is replaced by its triangular factor ``R``, which keeps all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from entroprefill_rag.engine.tap import BLOCK_ELEMENTS, BLOCK_ROWS
from entroprefill_rag.errors import ConfigError

Floats = NDArray[np.float64]

_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")


@dataclass(frozen=True)
class AttentionInputs:
    """What one attention call of the full run was about to use.

    Attributes:
        query: ``[1, H_Q, n, d]``, rotated and normed.
        key: ``[1, G, n, d]``, likewise.
        value: ``[1, G, n, d_v]``.
        mask: as the kernel gets it.
        kwargs: scaling, window, soft-cap, sink logits of the layer.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class HeadRows:
    """The retained rows of one layer.

    Attributes:
        eta: ``[H_Q, n']`` discarded mass of each retained row.
        change: ``[H_Q, n']`` ``||W_O^h (o - o_R)||`` with the layer's own query, keys and values; None where no
            projections were given.
        value_norm: ``[H_Q]`` largest ``||W_O^h v||`` over retained and removed keys.
        value_diameter: ``[H_Q]`` largest ``||W_O^h (v_s - v_t)||``, ``s`` retained, ``t`` removed.
        outputs: ``[n', H_Q * d_v]`` float32, the rows' outputs on retained keys, before the projection.
    """

    eta: Floats
    change: Floats | None = None
    value_norm: Floats | None = None
    value_diameter: Floats | None = None
    outputs: Tensor | None = None


def output_projection(attention: nn.Module, width: int) -> nn.Module:
    """The linear map behind the heads of an attention module, by its usual names.

    Args:
        attention: an attention module.
        width: its number of inputs, ``H_Q * d_v``, for the message.

    Raises:
        ConfigError: none of the names is there.
    """
    for name in _PROJECTIONS:
        found = getattr(attention, name, None)
        if isinstance(found, nn.Module):
            return found
    raise ConfigError(
        f"{type(attention).__name__} has none of {', '.join(_PROJECTIONS)}: its output projection ({width} inputs) is "
        "not found, so value norms cannot be measured; diagnose a model with a common attention module"
    )


def head_factors(projection: nn.Module, heads: int, size: int, like: Tensor) -> Tensor:
    """Triangular factor ``R_h`` of each head's slice of the output projection.

    The map is asked, not its weight: quantised and adapted (LoRA) projections answer alike.

    Args:
        projection: the linear map, ``[.., H_Q * d_v] -> [.., hidden]``.
        heads: H_Q.
        size: d_v.
        like: a tensor with the type and device of the projection's input.

    Returns:
        ``[H_Q, min(hidden, d_v), d_v]`` float32 on the same device: ``||R_h v|| = ||W_O^h v||``.
    """
    offset = projection(torch.zeros(1, heads * size, dtype=like.dtype, device=like.device)).float()
    factors = []
    for head in range(heads):
        basis = torch.zeros(size, heads * size, dtype=like.dtype, device=like.device)
        basis[:, head * size : (head + 1) * size].fill_diagonal_(1.0)
        columns = (projection(basis).float() - offset).T  # [hidden, d_v]
        factors.append(torch.linalg.qr(columns.cpu(), mode="r").R.to(like.device))
    return torch.stack(factors)


def read_heads(inputs: AttentionInputs, kept: Tensor, factors: Tensor | None, *, window: int | None) -> HeadRows:
    """Read all retained rows of one layer of the full run, in blocks of rows and one GQA group at a time.

    Softmax in float32 over the keys that the layer's mask allows, twice: over all of them, and over the retained ones
    alone. The second is the first renormalised (section 8). Extra memory: three blocks ``[H_Q / G, rows, n]`` of at
    most ``BLOCK_ELEMENTS`` each, the values ``[H_Q, n, d_v]`` and the outputs; nothing ``n x n``.

    Args:
        inputs: of the attention call.
        kept: ascending positions of retained tokens, int64 ``[n']``, on the CPU.
        factors: from :func:`head_factors`; None reads the discarded masses only.
        window: sliding window of the layer, used where the mask does not say it.
    """
    query, key = inputs.query[0], inputs.key[0]
    heads, groups, n = query.shape[0], key.shape[0], key.shape[1]
    per_group, device = heads // groups, query.device
    removed = torch.ones(n, dtype=torch.bool)
    removed[kept] = False
    gone = removed.to(device)
    values = None if factors is None else inputs.value[0].float()
    eta = torch.zeros(heads, len(kept), device=device)
    change = torch.zeros_like(eta)
    outputs = None if values is None else torch.zeros(heads, len(kept), values.shape[-1], device=device)
    block = max(1, min(BLOCK_ROWS, BLOCK_ELEMENTS // (per_group * n)))
    for begin in range(0, len(kept), block):
        part = kept[begin : begin + block]
        at, limit = slice(begin, begin + len(part)), int(part[-1]) + 1
        seen = _mask(part.to(device), limit, inputs.mask, inputs.kwargs.get("sliding_window") or window)
        for group in range(groups):
            span = slice(group * per_group, (group + 1) * per_group)
            logits = _logits(inputs, span, group, part.to(device), limit, seen)
            sinks = _sinks(inputs, span, len(part))
            weights = _softmax(logits, sinks)
            eta[span, at] = weights[..., gone[:limit]].sum(dim=-1)
            if values is None or factors is None or outputs is None:
                continue
            alone = _softmax(logits.masked_fill_(gone[:limit], float("-inf")), sinks)
            outputs[span, at] = torch.matmul(alone, values[group, :limit])
            moved = torch.matmul(weights - alone, values[group, :limit])
            change[span, at] = torch.einsum("hpd,hrd->hrp", factors[span], moved).norm(dim=-1)
    if values is None or factors is None or outputs is None:
        return HeadRows(eta=_numbers(eta))
    has_sinks = inputs.kwargs.get("s_aux") is not None
    norms, diameters = _value_sizes(values, factors, gone, per_group, has_sinks)
    return HeadRows(
        eta=_numbers(eta),
        change=_numbers(change),
        value_norm=norms,
        value_diameter=diameters,
        outputs=outputs.transpose(0, 1).flatten(1),
    )


def _mask(positions: Tensor, limit: int, mask: Tensor | None, window: int | None) -> Tensor:
    """What is added to the logits of some rows, ``[1 or H_Q, rows, limit]``; prompts here have no padding."""
    if mask is not None and mask.dim() == 4:
        rows = mask[0].index_select(1, positions.to(mask.device))[..., :limit].to(positions.device)
        if rows.dtype != torch.bool:
            return rows.float()
    else:
        keys = torch.arange(limit, device=positions.device)
        rows = keys <= positions[None, :, None]
        if window is not None:
            rows = rows & (keys > positions[None, :, None] - window)
    return torch.zeros(rows.shape, device=positions.device).masked_fill_(~rows, float("-inf"))


def _logits(inputs: AttentionInputs, span: slice, group: int, positions: Tensor, limit: int, mask: Tensor) -> Tensor:
    """Masked attention logits of some rows of one group, ``[r, rows, limit]``."""
    scaling, softcap = inputs.kwargs.get("scaling"), inputs.kwargs.get("softcap")
    query = inputs.query[0, span].index_select(1, positions).float()
    logits = torch.matmul(query, inputs.key[0, group, :limit].float().transpose(0, 1))
    logits.mul_(float(scaling) if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits.add_(mask[span] if mask.shape[0] > 1 else mask)


def _sinks(inputs: AttentionInputs, span: slice, rows: int) -> Tensor | None:
    given = inputs.kwargs.get("s_aux")
    return None if given is None else given[span].float().reshape(-1, 1, 1).expand(-1, rows, 1)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return logits.softmax(dim=-1)
    return torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def _value_sizes(
    values: Tensor, factors: Tensor, gone: Tensor, per_group: int, has_sinks: bool
) -> tuple[Floats, Floats]:
    """Largest norm and largest retained-removed distance of projected values, each ``[H_Q]``."""
    norms, diameters = [], []
    for head, factor in enumerate(factors):
        projected = (values[head // per_group] @ factor.T).cpu().double()
        norms.append(float(projected.norm(dim=-1).max()))
        retained, removed = projected[~gone.cpu()], projected[gone.cpu()]
        if has_sinks:
            # A learned sink is a retained key with the value zero.
            retained = torch.cat([retained, torch.zeros_like(retained[:1])])
        diameters.append(_diameter(retained, removed))
    return np.array(norms), np.array(diameters)


def _diameter(retained: Tensor, removed: Tensor) -> float:
    """As :func:`entroprefill_rag.rule.stability.value_diameter`, for thousands of values.

    Products are quicker than differences, and around a common centre in float64 they lose nothing that counts.
    """
    if not len(retained) or not len(removed):
        return 0.0
    centre = torch.cat([retained, removed]).mean(dim=0)
    retained, removed = retained - centre, removed - centre
    sizes = removed.square().sum(dim=-1)
    largest = 0.0
    for part in retained.split(max(1, BLOCK_ELEMENTS // len(removed))):
        squares = part.square().sum(dim=-1)[:, None] + sizes - 2.0 * part @ removed.T
        largest = max(largest, float(squares.max()))
    return float(np.sqrt(max(0.0, largest)))


def _numbers(values: Tensor) -> Floats:
    return np.asarray(values.cpu().double().numpy())
