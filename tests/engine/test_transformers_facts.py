"""What this package relies on in transformers. A release that changes one of these fails here first, with a name."""

import inspect as python_inspect

import torch
from tiny import model
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from entroprefill_rag.engine.gather import find_cache, stored_tokens


def layer_calls(touched, **arguments):
    """Arguments of every decoder layer in one forward."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, dict(kwargs))), with_kwargs=True)
        for layer in touched.model.layers
    ]
    with torch.no_grad():
        touched(torch.arange(3, 11)[None], **arguments)
    for hook in hooks:
        hook.remove()
    return seen


def test_hidden_states_are_the_one_positional_argument_of_a_layer():
    for args, _ in layer_calls(model()):
        assert len(args) == 1
        assert args[0].shape == (1, 8, 32)


def test_layers_get_positions_masks_and_cache_as_keywords():
    for _, kwargs in layer_calls(model("eager"), use_cache=True):
        assert {"attention_mask", "position_ids", "position_embeddings"} <= set(kwargs)
        cos, sin = kwargs["position_embeddings"]
        assert cos.shape[-2] == sin.shape[-2] == kwargs["position_ids"].shape[-1] == 8
        assert kwargs["attention_mask"].shape[-2:] == (8, 8)
        assert isinstance(find_cache(kwargs), Cache)


def test_without_padding_the_sdpa_mask_is_none():
    mask = torch.ones(1, 8, dtype=torch.long)
    assert all(kwargs["attention_mask"] is None for _, kwargs in layer_calls(model("sdpa"), attention_mask=mask))


def test_attention_is_looked_up_by_name_in_a_registry():
    assert "sdpa" in AttentionInterface()
    assert {"sdpa", "eager"} <= set(AttentionMaskInterface())
    touched = model()
    calls = []

    def spy(module, query, key, value, mask, **kwargs):
        calls.append((module.layer_idx, tuple(query.shape), tuple(key.shape), kwargs["scaling"]))
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("spy_of_this_test", spy)
    AttentionMaskInterface.register("spy_of_this_test", AttentionMaskInterface()["sdpa"])
    touched.config._attn_implementation = "spy_of_this_test"
    with torch.no_grad():
        touched(torch.arange(3, 11)[None])
    assert [call[0] for call in calls] == list(range(6))
    assert calls[0][1:] == ((1, 4, 8, 8), (1, 2, 8, 8), 8**-0.5)


def test_eager_attention_is_a_function_of_the_modelling_file():
    home = python_inspect.getmodule(type(model().model.layers[0].self_attn))
    assert callable(home.eager_attention_forward)


def test_a_dynamic_cache_holds_one_entry_a_layer_and_lets_them_differ_in_length():
    cache = DynamicCache()
    for layer, length in ((0, 7), (1, 4)):
        cache.update(torch.zeros(1, 2, length, 8), torch.zeros(1, 2, length, 8), layer)
    assert [stored_tokens(cache, layer) for layer in (0, 1, 2)] == [7, 4, 0]
    assert cache.get_seq_length() == 7
