"""Rows of attention -> attention mass per head, row and chunk (section 2).

Nothing here is ``n x n``: only the wanted rows are ever formed, and a chunk's mass is one product with a 0/1 matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class RowMasses:
    """What reading some query rows of one layer gives. CPU tensors.

    Attributes:
        chunks: ``[H_Q, R, k]`` float64, mass ``m[h, a, i]`` of row ``a`` on chunk ``i``, tokens outside the sinks.
        tokens: ``[H_Q, n]`` float32, mean over the rows per key (``pbar``); only when asked for.
    """

    chunks: Tensor
    tokens: Tensor | None = None


def chunk_membership(spans: Spans, n: int, *, first: int = 0, device: torch.device | str | None = None) -> Tensor:
    """The 0/1 matrix that says which token belongs to which chunk; build it once per request.

    Args:
        spans: half-open token ranges of the ``k`` chunks.
        n: keys, the length of the prompt in tokens.
        first: tokens before this position count for no chunk (the sinks).
        device: where the attention rows live.

    Returns:
        ``[n, k]`` float32.
    """
    membership = torch.zeros(n, len(spans), dtype=torch.float32, device="cpu")
    for i, (start, end) in enumerate(spans):
        membership[max(start, first) : max(end, first), i] = 1.0
    return membership.to(device)


def _float32_products_are_float32() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch refuses to answer once its old and its new settings have been mixed
        return False


def chunk_masses(attention: Tensor, membership: Tensor) -> Tensor:
    """Mass of every row on every chunk.

    One matrix product in float32, relative error about 1e-6 for float32 rows. Where the process lets float32 products
    run in TF32 or bfloat16 (errors up to 1e-3: more than a cap can stand) the product is done in float64 instead.

    Args:
        attention: ``[heads, rows, n]`` probabilities of the wanted rows.
        membership: ``[n, k]`` from :func:`chunk_membership`, on the same device.

    Returns:
        ``[heads, rows, k]`` float64 on the same device (float32 on MPS, which has nothing wider).
    """
    if attention.device.type == "mps":
        return attention.detach().float() @ membership
    dtype = torch.float32 if _float32_products_are_float32() else torch.float64
    return (attention.detach().to(dtype) @ membership.to(dtype)).double()


def row_masses(attention: Tensor, membership: Tensor, *, want_tokens: bool = False) -> RowMasses:
    """Everything the rule needs of the rows of one layer.

    Args:
        attention: ``[heads, rows, n]`` probabilities of the wanted rows.
        membership: ``[n, k]`` from :func:`chunk_membership`, on the same device.
        want_tokens: also take the mean over the rows per key.
    """
    tokens = attention.detach().float().mean(dim=1).cpu() if want_tokens else None
    return RowMasses(chunk_masses(attention, membership).cpu().double(), tokens)


def document_mass(chunks: Tensor) -> float:
    """Mean over heads and rows of the mass on all chunks: how much a layer looks at the documents at all.

    Args:
        chunks: ``[heads, rows, k]`` masses.
    """
    return float(chunks.double().sum(dim=-1).mean())


def discarded(masses: Tensor, removed: Sequence[int]) -> Tensor:
    """Discarded mass ``d[h, a](D)``: what the rows place on the chunks of a removed set.

    Args:
        masses: ``[..., k]`` masses per chunk.
        removed: positions of the removed chunks; may be empty.

    Returns:
        ``[...]`` float64.
    """
    return masses[..., list(removed)].double().sum(dim=-1)


def chunk_positions(spans: Spans, *, first: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of all chunk tokens outside the sinks, and the chunk each belongs to.

    Returns:
        Two arrays ``[T]``: token position (ascending) and chunk position.
    """
    positions = [np.arange(max(start, first), max(end, first), dtype=np.int64) for start, end in spans]
    owner = np.repeat(np.arange(len(spans), dtype=np.int64), [len(part) for part in positions])
    return np.concatenate([*positions, np.empty(0, dtype=np.int64)]), owner
