"""The wrong device: host-side numbers stay on the host, tensors of the model stay with the model."""

import pytest
import torch
from tiny import LOOSE, model, request, tokenizer

from entroprefill_rag import LocalBackend

SEEDED = LOOSE.model_copy(update={"audit": LOOSE.audit.model_copy(update={"seed": 7})})


@pytest.fixture
def elsewhere():
    """A default device that is not the model's, as a script that calls set_default_device has it."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_a_default_device_that_is_not_the_models_changes_nothing(elsewhere):
    torch.set_default_device(None)
    with LocalBackend(model(), tokenizer()) as backend:
        expected = backend.prune(request(), SEEDED)
        torch.set_default_device("meta")
        found = backend.prune(request(), SEEDED)
    assert found.audit.trials == expected.audit.trials
    assert found.retained_ids == expected.retained_ids


def test_a_generation_runs_with_a_default_device_that_is_not_the_models(elsewhere):
    torch.set_default_device(None)
    with LocalBackend(model(), tokenizer()) as backend:
        expected = backend.generate(request(), SEEDED, max_new_tokens=4)
        torch.set_default_device("meta")
        assert backend.generate(request(), SEEDED, max_new_tokens=4).answer == expected.answer


def test_layers_may_live_on_different_devices():
    """Every tensor is gathered where it is: the index follows the tensor, not the model."""
    from entroprefill_rag.engine.gather import TokenGather

    gather = TokenGather(torch.tensor([0, 2, 3]), n_tokens=5)
    here = gather.hidden(torch.arange(5.0).reshape(1, 5, 1))
    there = gather.hidden(torch.empty(1, 5, 1, device="meta"))
    assert here.flatten().tolist() == [0.0, 2.0, 3.0]
    assert (there.device.type, tuple(there.shape)) == ("meta", (1, 3, 1))
    arguments = gather.arguments({"position_ids": torch.arange(5, device="meta")[None], "attention_mask": None})
    assert arguments["position_ids"].device.type == "meta"
    assert arguments["attention_mask"] is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_an_accelerator_keeps_what_the_cpu_keeps(dtype):
    with LocalBackend(model(), tokenizer()) as backend:
        expected = backend.generate(request(), SEEDED, max_new_tokens=4)
    with LocalBackend(model().to("cuda", dtype), tokenizer()) as backend:
        found = backend.generate(request(), SEEDED, max_new_tokens=4)
        assert found.audit.model.device.startswith("cuda")
    if dtype is torch.float32:
        assert found.retained_ids == expected.retained_ids
        assert found.answer == expected.answer
