"""The head's constant bounds every change of a logit, and is not claimed for a head that it was not proved for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families_for_tests import build

from entroprefill_rag.diagnosis.head import divergence, head_constant, margin


def logits_of(model, state):  # type: ignore[no-untyped-def]
    """The model's own head on one state, soft-cap and scaling included, written down per family."""
    raw = model.lm_head(model.model.norm(state[None]))[0]
    if model.config.model_type == "granite":
        raw = raw / model.config.logits_scaling
    if cap := getattr(model.config, "final_logit_softcapping", None):
        raw = torch.tanh(raw / cap) * cap
    return raw.double().numpy()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "granite", "olmo2"])
def test_no_pair_of_states_moves_a_logit_further(name: str) -> None:
    model, generator = build(name, "eager"), torch.Generator().manual_seed(0)
    closest = 0.0
    with torch.no_grad():
        for size in (1e-3, 0.1, 1.0, 10.0):
            for _ in range(20):
                first = torch.randn(32, generator=generator)
                second = first + size * torch.randn(32, generator=generator)
                full, pruned = logits_of(model, first), logits_of(model, second)
                head = head_constant(model, model.model, (first, second), full)
                assert head is not None
                moved = float(np.abs(full - pruned).max())
                assert moved <= head.lipschitz * float((first - second).norm()) * (1 + 1e-4)
                assert moved <= head.cap * (1 + 1e-5)
                closest = max(closest, moved / (head.lipschitz * float((first - second).norm())))
    assert closest > 0.2, "a constant this loose would pass with a factor missing"


def test_a_head_with_another_norm_or_other_logits_gets_no_constant() -> None:
    model = build("llama", "eager")
    state = torch.randn(32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = logits_of(model, state)
        assert head_constant(model, model.model, (state, state), logits) is not None
        assert head_constant(model, model.model, (state, state), logits * 1.01) is None
        model.model.norm = torch.nn.LayerNorm(32)
        assert head_constant(model, model.model, (state, state), logits_of(model, state)) is None


def test_divergence_and_margin_are_those_written_out() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 50)) * 5
    left, right = np.exp(first) / np.exp(first).sum(), np.exp(second) / np.exp(second).sum()
    assert divergence(first, second) == pytest.approx((left * np.log(left / right)).sum())
    assert divergence(first, first) == 0.0
    assert divergence(first, second) != pytest.approx(divergence(second, first))
    assert margin(np.array([1.0, 5.0, 3.5])) == 1.5
