"""A run below the backend: a cache that cannot become ragged is refused there too, whoever drives the model."""

from types import SimpleNamespace

import pytest
import torch
from tiny import model

from entroprefill_rag.engine.install import Installation
from entroprefill_rag.engine.run import PrefillRun


class Keep:
    """Accepts at layer 2, keeping every other token and the last ones."""

    layers = (2,)

    def observe(self, layer, read):
        kept = torch.tensor([0, 1, 2, 3, *range(4, 14, 2), *range(14, 20)])
        return SimpleNamespace(accepted=True, kept_tokens=kept, removed=(0,))


def drive(**generation):
    touched = model()
    installation = Installation(touched)
    run = PrefillRun(installation.anatomy, 20, Keep(), torch.zeros(20, 1))
    ids = torch.arange(5, 25)[None]
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, **generation}
    with installation.activate(run):
        tokens = touched.generate(ids, **arguments)
    installation.close()
    return run, tokens, model().generate(ids, **arguments)


def test_a_dynamic_cache_may_become_ragged():
    run, _, _ = drive()
    assert (run.layer, run.refusal) == (2, None)


@pytest.mark.parametrize(
    "generation", [{"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}]
)
def test_any_other_cache_is_refused_and_the_answer_is_the_full_one(generation):
    run, tokens, expected = drive(**generation)
    assert run.layer is None
    assert run.refusal.code == "cache_implementation"
    assert torch.equal(tokens, expected)
