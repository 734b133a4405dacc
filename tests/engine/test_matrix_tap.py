"""What the tap reads is what the model attends with: every family, kernel, layer and row, against the model's own word.

The reference is the same weights under eager attention, which hands out its probabilities after soft-cap, q/k-norm,
rotation, scaling, window and sink logit.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from families_for_tests import CASES, LAYERS, LONG, QUERY_HEADS, SHORT, Prompt, one_thread, shared
from matrix_subject import ForcedDecision, Subject, greedy, subject
from oracle import reference_attention_rows

# Probabilities are at most 1, from one softmax in float32 over logits that carry the rounding of the layers below them:
# seen, at most 1.8e-6.
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Iterator[Subject]:
    installed = subject(*request.param)
    with one_thread():
        yield installed
    installed.installation.close()


@pytest.mark.parametrize("padding", [0, 5], ids=["bare", "padded"])
@pytest.mark.parametrize("prompt", [LONG, SHORT], ids=["above the window", "below the window"])
def test_rows_read_are_those_the_model_attends_with(case: Subject, prompt: Prompt, padding: int) -> None:
    ids = [0] * padding + prompt.ids
    # All of them, in no order: more rows than are read in one block.
    rows = torch.randperm(prompt.n, generator=torch.Generator().manual_seed(0)) + padding
    watching = ForcedDecision(None, (), len(ids), layers=tuple(range(LAYERS)), rows=rows)
    case.generate(ids, watching, padding=padding, steps=1)
    assert sorted(watching.masses) == list(range(LAYERS))
    for layer, masses in watching.masses.items():
        expected = reference_attention_rows(shared(case.name, "eager"), ids, layer, rows, padding)
        assert masses.chunks.shape == (QUERY_HEADS, len(rows), len(ids))
        assert float((masses.chunks - expected).abs().max()) < TOLERANCE
        assert float((masses.tokens - expected.mean(1)).abs().max()) < TOLERANCE
        # Uneven, and different from head to head: else a tap that mixed up rows or heads could pass.
        assert float((expected[0] - expected[1]).abs().max()) > 0.05


def test_a_few_rows_alone_are_read_as_among_many(case: Subject) -> None:
    few = torch.tensor([LONG.n - 1, 20])
    watching = ForcedDecision(None, (), LONG.n, layers=(1, 4), rows=few)
    case.generate(LONG.ids, watching, steps=1)
    for layer in (1, 4):
        expected = reference_attention_rows(shared(case.name, "eager"), LONG.ids, layer, few)
        assert float((watching.masses[layer].chunks - expected).abs().max()) < TOLERANCE


def test_reading_leaves_the_run_as_it_was_bit_for_bit(case: Subject) -> None:
    watching = ForcedDecision(None, (), LONG.n, layers=(1, 3), rows=torch.arange(LONG.n - 8, LONG.n))
    read = case.generate(LONG.ids, watching)
    assert torch.equal(read.logits, greedy(case.untouched, LONG.ids).logits)


def test_the_layer_that_accepts_is_the_last_one_read(case: Subject) -> None:
    accepting = ForcedDecision(2, LONG.tokens_of((1,)), LONG.n, layers=(1, 2, 3, 4), rows=torch.tensor([LONG.n - 1]))
    case.generate(LONG.ids, accepting, steps=2)
    assert sorted(accepting.masses) == [1, 2]
