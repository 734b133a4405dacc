"""From the last state to the next token: the constant C of the head, and how two next-token distributions differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entroprefill_rag.diagnosis.heads import Floats
from entroprefill_rag.rule.stability import local_head_lipschitz, trivial_logit_cap

_ROWS = 8192


@dataclass(frozen=True)
class HeadConstant:
    """What is known of the final norm and the unembedding.

    Attributes:
        lipschitz: C, local: for last states of norm at least ``rho`` (correction 2).
        rho: smallest norm of the last token's state over both runs.
        cap: most that a logit can change whatever happens below.
    """

    lipschitz: float
    rho: float
    cap: float


def head_constant(model: Any, decoder: Any, states: tuple[Tensor, Tensor], logits: Floats) -> HeadConstant | None:
    """The constant of the head between two last states, if the head is what the theorem is about.

    That is: an RMS norm, a matrix, perhaps a factor and a soft-cap. It is asked rather than read, and checked against
    the model's own logits. The norm's weight is taken together with the unembedding, row by row: sharper than the
    product of their largest entries.

    Args:
        model: the causal model.
        decoder: its decoder.
        states: last token's state before the final norm, full and pruned, ``[hidden]`` each.
        logits: of the first state, ``[vocabulary]``.

    Returns:
        None where the head is another one: no logit bound is given then.
    """
    norm, unembedding = getattr(decoder, "norm", None), model.get_output_embeddings()
    weight = getattr(unembedding, "weight", None)
    if norm is None or not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    full = states[0]
    hidden = full.shape[-1]
    epsilon = float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0)
    ones = torch.ones_like(full)
    gamma = norm(ones[None])[0].float() * (1.0 + epsilon) ** 0.5
    if not _is_rms(norm, full, gamma, epsilon):
        return None
    config = decoder.config
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    raw = unembedding(norm(full[None]).to(weight.device))[0].float().cpu().double().numpy() * factor
    softcap = getattr(config, "final_logit_softcapping", None)
    expected = np.tanh(raw / softcap) * softcap if softcap else raw
    tolerance = max(1e-4, 10.0 * float(torch.finfo(full.dtype).eps)) * float(np.abs(logits).max())
    if expected.shape != logits.shape or float(np.abs(expected - logits).max()) > tolerance:
        return None
    rows = max(
        float((part.float() * gamma.to(part.device)).norm(dim=-1).max()) for part in weight.detach().split(_ROWS)
    )
    rows *= abs(factor)
    rho = min(float(state.float().cpu().double().norm()) for state in states)
    cap = trivial_logit_cap(unembedding_norm=rows, gamma_max=1.0, hidden=hidden)
    return HeadConstant(
        lipschitz=local_head_lipschitz(unembedding_norm=rows, gamma_max=1.0, rho=rho, hidden=hidden, norm_eps=epsilon),
        rho=rho,
        # A soft-cap is 1-Lipschitz, and no two logits under it are further apart than twice the cap.
        cap=min(cap, 2.0 * float(softcap)) if softcap else cap,
    )


def _is_rms(norm: Any, state: Tensor, gamma: Tensor, epsilon: float) -> bool:
    """Whether the final norm divides by the root mean square and multiplies by ``gamma``, with nothing added."""
    values = state.float()
    expected = gamma * values / torch.sqrt(values.square().mean() + epsilon)
    error = (norm(state[None])[0].float() - expected).norm()
    return float(error) <= max(1e-4, 10.0 * float(torch.finfo(state.dtype).eps)) * float(expected.norm())


def divergence(first: Floats, second: Floats) -> float:
    """Kullback-Leibler divergence of two next-token distributions, in nats, from their logits ``[vocabulary]``."""
    left, right = (values - values.max() for values in (first, second))
    left, right = (values - np.log(np.exp(values).sum()) for values in (left, right))
    return max(0.0, float((np.exp(left) * (left - right)).sum()))


def margin(logits: Floats) -> float:
    """Top-1 minus top-2 logit."""
    top = np.partition(logits, -2)[-2:]
    return float(top[1] - top[0])
