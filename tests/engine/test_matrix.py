"""The matrix: families x kernels x layers x kept sets, the engine against the masked full run of the oracle.

Both run in float32 and differ only in which zero terms are added up and in what order, so they may differ by rounding
alone: seen over the whole matrix, on both supported releases of transformers, by at most 2.8e-6 of the largest logit.
The least that any removal here changes is 3.6e-3. The tolerance lies between, far from both, and a case whose removal
changes less than fifty times the tolerance fails: it would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from families_for_tests import CASES, LONG, SHORT, Prompt, one_thread
from matrix_subject import STEPS, ForcedDecision, Subject, forward, greedy, relative_difference, subject
from oracle import reference_generate
from transformers import DynamicCache

TOLERANCE = 2e-5
DIFFERS = 50 * TOLERANCE

EVERY_CHUNK = tuple(range(len(LONG.chunks)))
REMOVALS = [
    pytest.param(LONG, (), id="nothing removed"),
    pytest.param(LONG, EVERY_CHUNK, id="only protected kept"),
    pytest.param(LONG, (0,), id="first chunk gone"),
    pytest.param(LONG, EVERY_CHUNK[-1:], id="last chunk gone"),
    pytest.param(LONG, (1, 2, 3), id="middle chunks gone"),
    pytest.param(LONG, (0, 2, 4), id="every other chunk gone"),
    pytest.param(SHORT, (), id="below the window, nothing removed"),
    pytest.param(SHORT, (0,), id="below the window, first chunk gone"),
    pytest.param(SHORT, (0, 1, 2), id="below the window, only protected kept"),
]
PADDING = 5


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Iterator[Subject]:
    installed = subject(*request.param)
    with one_thread():
        yield installed
    installed.installation.close()


def assert_equals_the_reference(
    case: Subject, decision: ForcedDecision, ids: list[int], tokens: list[int], logits: torch.Tensor, padding: int = 0
) -> None:
    """Logits after the prompt and after each of ``tokens`` but the last are the oracle's, and so is each greedy token.

    With the engine's tokens fed to the oracle, equal arg-maxima at every step mean, by induction, equal generations.
    """
    expected = case.reference([*ids, *tokens[: len(logits) - 1]], len(ids), decision, padding=padding)
    assert logits.shape == expected.shape
    assert relative_difference(logits, expected) < TOLERANCE
    assert expected.argmax(-1).tolist() == tokens
    if decision.removed:
        nothing_removed = ForcedDecision(None, (), len(ids))
        plain = case.reference(ids, len(ids), nothing_removed, padding=padding)
        assert relative_difference(expected[:1], plain) > DIFFERS, "vacuous: removal changes nothing here"


@pytest.mark.parametrize("which_layer", [0, 1], ids=["lower layer", "upper layer"])
@pytest.mark.parametrize(("prompt", "chunks"), REMOVALS)
def test_a_pruned_run_is_the_masked_full_run(
    case: Subject, which_layer: int, prompt: Prompt, chunks: tuple[int, ...]
) -> None:
    decision = case.decision(case.family.prune_layers[which_layer], prompt.tokens_of(chunks), prompt.n)
    outcome = case.generate(prompt.ids, decision)
    assert len(outcome.tokens) == 1 + STEPS
    assert_equals_the_reference(case, decision, prompt.ids, outcome.tokens, outcome.logits)


def test_greedy_tokens_are_those_of_a_run_recomputed_at_every_step(case: Subject) -> None:
    layer, removed = case.family.prune_layers[0], LONG.tokens_of((0, 2, 4))
    outcome = case.generate(LONG.ids, case.decision(layer, removed, LONG.n))
    assert outcome.tokens == reference_generate(
        case.untouched, LONG.ids, case.family.windows, layer, removed, 1 + STEPS
    )


@pytest.mark.parametrize("prompt", [LONG, SHORT], ids=["above the window", "below the window"])
def test_a_pruned_padded_prompt_is_the_masked_full_run(case: Subject, prompt: Prompt) -> None:
    ids = [0] * PADDING + prompt.ids
    removed = [token + PADDING for token in prompt.tokens_of((0, 2))]
    decision = case.decision(case.family.prune_layers[0], removed, len(ids))
    outcome = case.generate(ids, decision, padding=PADDING)
    assert_equals_the_reference(case, decision, ids, outcome.tokens, outcome.logits, padding=PADDING)


@pytest.mark.parametrize("padding", [None, 0], ids=["no mask", "a mask of ones"])
def test_a_forward_without_generate_is_pruned_too(case: Subject, padding: int | None) -> None:
    decision = case.decision(case.family.prune_layers[0], LONG.tokens_of((0, 3)), LONG.n)
    with case.running(decision, LONG.n):
        logits = forward(case.model, LONG.ids, DynamicCache(config=case.model.config), padding=padding)
    assert len(logits) == LONG.n - len(decision.removed)
    assert relative_difference(logits[-1:], case.reference(LONG.ids, LONG.n, decision)) < TOLERANCE


@pytest.mark.parametrize("padding", [None, 0, PADDING], ids=["no mask", "a mask of ones", "padded"])
@pytest.mark.parametrize("prompt", [LONG, SHORT], ids=["above the window", "below the window"])
def test_several_tokens_appended_at_once_see_what_is_left(case: Subject, prompt: Prompt, padding: int | None) -> None:
    pads = padding or 0
    ids, appended = [0] * pads + prompt.ids, [17, 99, 54, 3, 76, 21]
    n = len(ids)
    decision = case.decision(case.family.prune_layers[0], [token + pads for token in prompt.tokens_of((0, 2))], n)
    cache = DynamicCache(config=case.model.config)
    with case.running(decision, n):
        logits = [forward(case.model, ids, cache, padding=padding)[-1:]]
        # Several, one, several: a caller's own tokens, with a step of decoding in between.
        for first, end in ((0, 3), (3, 4), (4, 6)):
            logits.append(forward(case.model, appended[first:end], cache, start=n + first, padding=padding))
    expected = case.reference([*ids, *appended], n, decision, padding=pads)
    assert relative_difference(torch.cat(logits), expected) < TOLERANCE
    unpruned = case.reference([*ids, *appended], n, ForcedDecision(None, (), n), padding=pads)
    assert relative_difference(expected, unpruned) > DIFFERS


def test_a_run_that_accepts_nothing_is_plain_generate_bit_for_bit(case: Subject) -> None:
    plain = greedy(case.untouched, LONG.ids)
    watching = ForcedDecision(None, (), LONG.n, layers=case.family.prune_layers)
    for decision in (watching, None):
        bypassed = case.generate(LONG.ids, decision)
        assert bypassed.tokens == plain.tokens
        assert torch.equal(bypassed.logits, plain.logits)


def test_without_an_active_run_the_model_is_as_it_was_bit_for_bit(case: Subject) -> None:
    case.generate(LONG.ids, case.decision(case.family.prune_layers[0], LONG.tokens_of((0,)), LONG.n))
    assert torch.equal(greedy(case.model, LONG.ids).logits, greedy(case.untouched, LONG.ids).logits)


def test_the_engine_finds_the_windows_and_heads_that_the_tests_know(case: Subject) -> None:
    anatomy = case.installation.anatomy
    assert anatomy.why_not is None
    assert anatomy.windows == case.family.windows
    assert (anatomy.query_heads, anatomy.kv_heads) == (4, 2)
