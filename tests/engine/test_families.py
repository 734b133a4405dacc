"""What a model must have, and the reason in words where it has not."""

import copy

import pytest
import torch
from tiny import LOOSE, model, request, tokenizer
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from entroprefill_rag import LocalBackend
from entroprefill_rag.engine.families import default_layers, fingerprint, inspect, monitorable, shape_of


def why(touched):
    reason = inspect(touched).why_not
    return reason.code if reason else None


def test_a_llama_can_be_pruned_and_its_parts_are_found():
    found = inspect(model())
    assert found.why_not is None
    assert (len(found.layers), found.query_heads, found.kv_heads, found.kernel) == (6, 4, 2, "sdpa")
    assert [attention.layer_idx for attention in found.attentions] == list(range(6))
    assert found.windows == (None,) * 6


def test_windows_are_found_where_every_layer_slides():
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    assert inspect(MistralForCausalLM(config)).windows == (16, 16, 16)


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (lambda: model(layers=2), "model_no_layers"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=64)), "model_no_layers"),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=3, num_heads=2, vocab_size=64)
            ),
            "model_encoder_decoder",
        ),
    ],
    ids=["two layers", "layers under another name", "encoder-decoder"],
)
def test_structures_that_cannot_be_pruned(build, code):
    assert why(build()) == code


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        ("layer_types", ["full_attention"] * 5 + ["linear_attention"], "model_layer_types"),
        ("layer_types", ["chunked_attention"] * 6, "model_layer_types"),
        ("num_kv_shared_layers", 2, "model_shared_kv"),
        ("use_bidirectional_attention", True, "model_bidirectional"),
        ("_attn_implementation", "flex_attention", "model_kernel"),
    ],
)
def test_settings_that_cannot_be_pruned(setting, value, code):
    touched = model()
    setattr(touched.config, setting, value)
    assert why(touched) == code


def test_a_layer_without_attention_is_named():
    touched = model()
    touched.model.layers[3].self_attn = nn.Identity()
    assert why(touched) == "model_mixed_layers"


def outside_the_registry(touched):
    touched.model.__class__ = type("Own", (type(touched.model),), {"_supports_attention_backend": False})


def test_a_model_outside_the_registry_is_named():
    touched = model()
    outside_the_registry(touched)
    assert why(touched) == "model_no_registry"


def test_a_model_that_cannot_be_pruned_is_untouched_and_answers_in_full():
    touched = model()
    outside_the_registry(touched)
    with LocalBackend(touched, tokenizer()) as backend:
        assert touched.config._attn_implementation == "sdpa"
        result = backend.generate(request(), LOOSE, max_new_tokens=3)
    assert (result.audit.outcome, result.audit.reason.code) == ("bypassed", "model_no_registry")
    assert result.usage.generated_tokens == 3


def test_windowed_layers_that_do_not_see_back_to_the_first_chunk_are_not_monitored():
    found = copy.copy(inspect(model()))
    object.__setattr__(found, "windows", (None, 50, None, 100, None, None))
    assert monitorable(found, (20, 90), 100) == (2, 3, 4)
    assert monitorable(found, (60, 90), 100) == (1, 2, 3, 4)


def test_default_layers_are_few_ascending_and_in_the_upper_middle():
    found = inspect(model(layers=30))
    layers = default_layers(found, tuple(range(1, 29)))
    assert len(layers) == 8
    assert layers == tuple(sorted(set(layers)))
    assert layers[0] >= 0.45 * 30
    assert layers[-1] <= 0.8 * 30 - 1


def test_the_fingerprint_is_of_configuration_and_tokenizer_not_of_weights():
    one, other = model(seed=1), model(seed=2)
    assert fingerprint(one, tokenizer()) == fingerprint(other, tokenizer())
    assert fingerprint(model(layers=7), tokenizer()) != fingerprint(one, tokenizer())
    changed = tokenizer()
    changed.add_tokens(["more"])
    assert fingerprint(one, changed) != fingerprint(one, tokenizer())


def test_the_shape_for_the_cost_model_is_the_models():
    touched = model()
    shape = shape_of(touched, inspect(touched))
    weights = sum(p.numel() for layer in touched.model.layers for p in layer.parameters() if p.dim() == 2)
    assert shape.linear_flops == 2 * weights // 6
    assert shape.bytes_per_value == torch.float32.itemsize


def test_a_multimodal_wrapper_and_an_adapter_lead_to_the_same_decoder():
    touched = model()

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.base_model = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("base_model"), name)

    assert inspect(Wrapper(touched)).decoder is touched.model
