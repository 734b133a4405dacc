"""What a run leaves behind: nothing; and what it does to others meanwhile: nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families_for_tests import LAYERS, LONG, build, one_thread, shared
from matrix_subject import ForcedDecision, Outcome, Subject, forward, greedy, relative_difference, subject
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from entroprefill_rag.engine.install import Installation
from entroprefill_rag.engine.run import PrefillRun
from entroprefill_rag.engine.tap import ACTIVE_RUN

CASES = [("llama", "sdpa"), ("mistral", "eager"), ("gemma3", "sdpa"), ("gpt-oss", "eager")]
LAYER = 1
REMOVED = LONG.tokens_of((0, 2))


@pytest.fixture(params=CASES, ids=["-".join(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Iterator[Subject]:
    installed = subject(*request.param)
    with one_thread():
        yield installed
    installed.installation.close()


def forced() -> ForcedDecision:
    return ForcedDecision(LAYER, REMOVED, LONG.n)


def traces(model: PreTrainedModel) -> dict[str, Any]:
    """All that an installation or a run could have left on a model: attention, hooks, attributes, forwards."""
    found: dict[str, Any] = {"attention": model.config._attn_implementation}
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks"):
            if getattr(module, kind):
                found[f"{name}.{kind}"] = sorted(map(id, getattr(module, kind).values()))
        found[f"{name} attributes"] = sorted(vars(module))
        found[f"{name} forward"] = (type(module), "forward" in vars(module))
    return found


def assert_as_if_nothing_had_been(case: Subject, before: dict[str, Any]) -> None:
    assert traces(case.model) == before
    assert ACTIVE_RUN.get() is None
    plain, expected = greedy(case.model, LONG.ids), greedy(case.untouched, LONG.ids)
    assert plain.tokens == expected.tokens
    assert torch.equal(plain.logits, expected.logits)


def test_a_run_leaves_no_trace(case: Subject) -> None:
    before = traces(case.model)
    pruned = case.generate(LONG.ids, forced())
    assert relative_difference(pruned.logits[:1], greedy(case.untouched, LONG.ids).logits[:1]) > 1e-3
    assert_as_if_nothing_had_been(case, before)


class Broken(Exception):
    """Raised by the tests inside a layer."""


def break_a_layer(case: Subject, layer: int) -> Callable[[], None]:
    def explode(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise Broken

    return case.model.model.layers[layer].mlp.register_forward_pre_hook(explode).remove


@pytest.mark.parametrize("layer", [0, LAYER, LAYER + 1, LAYERS - 1])
def test_an_exception_inside_a_layer_leaves_no_trace(case: Subject, layer: int) -> None:
    before = traces(case.model)
    repair = break_a_layer(case, layer)
    with pytest.raises(Broken):
        case.generate(LONG.ids, forced())
    repair()
    assert_as_if_nothing_had_been(case, before)
    again = case.generate(LONG.ids, forced())
    expected = case.reference([*LONG.ids, *again.tokens[:-1]], LONG.n, forced())
    assert relative_difference(again.logits, expected) < 2e-5


def test_an_exception_in_the_decision_leaves_no_trace(case: Subject) -> None:
    class Undecided(ForcedDecision):
        def observe(self, layer: int, read: Any) -> Any:
            raise Broken

    before = traces(case.model)
    with pytest.raises(Broken):
        case.generate(LONG.ids, Undecided(LAYER, (), LONG.n))
    assert_as_if_nothing_had_been(case, before)


def test_closing_takes_everything_off(case: Subject) -> None:
    name, kernel = case.name, case.kernel
    model = build(name, kernel)
    before = traces(model)
    installation = Installation(model)
    assert traces(model) != before
    with installation.activate(PrefillRun(installation.anatomy, LONG.n, forced(), torch.eye(LONG.n))):
        pruned = greedy(model, LONG.ids)
    installation.close()
    installation.close()
    assert traces(model) == before
    assert torch.equal(greedy(model, LONG.ids).logits, greedy(shared(name, kernel), LONG.ids).logits)
    assert not torch.equal(pruned.logits, greedy(model, LONG.ids).logits)


def test_closing_one_of_two_installations_leaves_the_other_at_work(case: Subject) -> None:
    second = Installation(case.model)
    expected = case.generate(LONG.ids, forced())
    case.installation.close()
    with second.activate(PrefillRun(second.anatomy, LONG.n, forced(), torch.eye(LONG.n))):
        assert torch.equal(greedy(case.model, LONG.ids).logits, expected.logits)
    second.close()
    assert traces(case.model) == traces(build(case.name, case.kernel))


def test_a_run_in_one_thread_is_not_seen_in_another(case: Subject) -> None:
    seen: list[Outcome] = []
    with case.running(forced(), LONG.n):
        other = threading.Thread(target=lambda: seen.append(greedy(case.model, LONG.ids)))
        other.start()
        other.join()
        pruned = greedy(case.model, LONG.ids)
    assert torch.equal(seen[0].logits, greedy(case.untouched, LONG.ids).logits)
    assert not torch.equal(seen[0].logits, pruned.logits)


def test_layers_above_hold_retained_tokens_only(case: Subject) -> None:
    cache = DynamicCache(config=case.model.config)
    with case.running(forced(), LONG.n):
        forward(case.model, LONG.ids, cache)
    for layer, window in enumerate(case.family.windows):
        held = LONG.n if layer <= LAYER else LONG.n - len(REMOVED)
        expected = held if window is None else min(held, window - 1)
        assert cache.layers[layer].keys.shape[-2] == expected


def test_a_batch_of_two_is_answered_in_full(case: Subject) -> None:
    ids = torch.tensor([LONG.ids, LONG.ids])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    with case.running(forced(), LONG.n) as run:
        batch = case.model.generate(ids, **options)
    assert run.refusal is not None
    assert run.layer is None
    assert torch.equal(batch, case.untouched.generate(ids, **options))


def test_a_prompt_of_another_length_is_answered_in_full(case: Subject) -> None:
    with case.running(forced(), LONG.n) as run:
        longer = greedy(case.model, [*LONG.ids, 7])
    assert run.refusal is not None
    assert run.layer is None
    assert torch.equal(longer.logits, greedy(case.untouched, [*LONG.ids, 7]).logits)


def test_nothing_keeps_a_run_alive(case: Subject) -> None:
    with case.running(forced(), LONG.n) as run:
        greedy(case.model, LONG.ids)
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
