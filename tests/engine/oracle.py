"""What a pruned run must compute, found another way: the full run, with removed tokens masked out.

Section 7 of the algorithm: the result equals a full run in which, at layers above the pruned one, no retained token
attends to a removed one. So nothing is gathered, compacted or cached here. The model's own forward sees the whole
sequence, prompt and generated tokens alike, and every layer is handed a mask written out from original indices.

The whole mask is replaced, not amended: sliding windows come from the tests' own table, never from the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import BoolTensor, LongTensor, Tensor, nn
from transformers import PreTrainedModel


def allowed_pairs(n: int, window: int | None, hidden: Iterable[int], padding: int = 0) -> BoolTensor:
    """Which row may see which key, all by index in the full sequence.

    Args:
        n: length of the sequence, padding included.
        window: number of last keys a row may see, itself included; None for no limit.
        hidden: keys that no other row may see.
        padding: number of leading pad tokens.

    Returns:
        ``[n, n]``, rows by keys. Every row sees itself, so that no softmax is over nothing; of hidden and pad rows the
        output is of no interest, as nobody sees them.
    """
    rows = [[False] * n for _ in range(n)]
    invisible = set(hidden) | set(range(padding))
    for row in range(n):
        first = padding if window is None else max(padding, row - window + 1)
        for key in range(first, row + 1):
            rows[row][key] = key not in invisible
        rows[row][row] = True
    return torch.tensor(rows)


def as_layer_mask(pairs: BoolTensor, kernel: str) -> Tensor:
    """The mask in the form the kernel takes, ``[1, 1, n, n]``: boolean for sdpa, an additive float32 one for eager."""
    if kernel == "sdpa":
        return pairs[None, None]
    if kernel == "eager":
        return torch.zeros(pairs.shape).masked_fill(~pairs, float("-inf"))[None, None]
    raise ValueError(f"no mask form known for the kernel {kernel!r}")


@contextmanager
def _masks_replaced(layers: Sequence[nn.Module], masks: Sequence[Tensor]) -> Iterator[None]:
    def replace(mask: Tensor) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if "attention_mask" not in kwargs:
                raise AssertionError(f"{type(module).__name__} takes no attention_mask by keyword: nothing to replace")
            return args, {**kwargs, "attention_mask": mask}

        return hook

    handles = [
        layer.register_forward_pre_hook(replace(mask), with_kwargs=True)
        for layer, mask in zip(layers, masks, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def masked_full_run(
    model: PreTrainedModel,
    ids: Sequence[int],
    windows: Sequence[int | None],
    layer: int,
    removed: Iterable[int] = (),
    padding: int = 0,
) -> Tensor:
    """Logits of every position of ``ids`` when the tokens ``removed`` are out of sight above ``layer``.

    Args:
        model: a causal model run with sdpa or eager attention.
        ids: the whole sequence, padding, prompt and generated tokens.
        windows: per layer, its sliding window or None.
        layer: the last layer at which removed tokens are still seen; -1 to hide them everywhere.
        removed: indices into ``ids``.
        padding: how many of the first ids are padding.

    Returns:
        ``[n, vocabulary]`` float32. Rows of padding and removed tokens mean nothing.
    """
    n = len(ids)
    removed = frozenset(removed)
    kernel = model.config._attn_implementation
    forms = {
        (window, hidden): as_layer_mask(allowed_pairs(n, window, hidden, padding), kernel)
        for window in set(windows)
        for hidden in (frozenset[int](), removed)
    }
    masks = [forms[window, removed if number > layer else frozenset[int]()] for number, window in enumerate(windows)]
    positions = torch.tensor([[max(0, index - padding) for index in range(n)]])
    with torch.no_grad(), _masks_replaced(model.model.layers, masks):
        output = model(
            input_ids=torch.tensor([list(ids)]),
            # Positions that repeat under padding would else be taken for packed sequences.
            attention_mask=torch.ones(1, n, dtype=torch.long),
            position_ids=positions,
            use_cache=False,
        )
    return output.logits[0]


def reference_logits(
    model: PreTrainedModel,
    ids: Sequence[int],
    windows: Sequence[int | None],
    layer: int,
    removed: Iterable[int],
    n_prompt: int,
    padding: int = 0,
) -> Tensor:
    """Logits that follow the prompt and each generated token of ``ids``, teacher-forced.

    Args:
        n_prompt: number of leading ids that are the prompt, padding included. Others as in ``masked_full_run``.

    Returns:
        ``[len(ids) - n_prompt + 1, vocabulary]``: row 0 is what the end of prefill gives, row t what step t gives.
    """
    return masked_full_run(model, ids, windows, layer, removed, padding)[n_prompt - 1 :]


def reference_generate(
    model: PreTrainedModel,
    ids: Sequence[int],
    windows: Sequence[int | None],
    layer: int,
    removed: Iterable[int],
    steps: int,
    padding: int = 0,
) -> list[int]:
    """Greedy continuation of the prompt ``ids``: ``steps`` tokens, the whole sequence computed anew for each."""
    removed = frozenset(removed)
    sequence = list(ids)
    for _ in range(steps):
        sequence.append(int(masked_full_run(model, sequence, windows, layer, removed, padding)[-1].argmax()))
    return sequence[len(ids) :]


def reference_attention_rows(
    eager_model: PreTrainedModel, ids: Sequence[int], layer: int, rows: LongTensor, padding: int = 0
) -> Tensor:
    """Attention rows of an unpruned run, as the model itself reports them.

    Args:
        eager_model: the model run with eager attention, the only kernel that hands its probabilities out; with the
            same weights it is the reference for any kernel.
        layer: whose attention.
        rows: query positions, ``[R]``.
        padding: number of leading pad tokens in ``ids``.

    Returns:
        ``[query heads, R, n]`` float32. With sink logits the rows sum to less than 1.
    """
    present = torch.tensor([[0] * padding + [1] * (len(ids) - padding)])
    with torch.no_grad():
        output = eager_model(
            input_ids=torch.tensor([list(ids)]), attention_mask=present, use_cache=False, output_attentions=True
        )
    return output.attentions[layer][0][:, rows]
