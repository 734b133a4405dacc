"""The reference itself, held against plain transformers and against a Llama forward written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from families_for_tests import CASES, FAMILIES, FULL, LAYERS, LONG, SHORT, WINDOW, Prompt, one_thread, shared
from oracle import (
    allowed_pairs,
    masked_full_run,
    reference_attention_rows,
    reference_generate,
    reference_logits,
)
from torch import Tensor
from transformers import PreTrainedModel

# float32 has 1.2e-7 relative rounding; logits are of size 1 to 15 after some tens of sums of 32 to 64 terms.
ROUNDING = 1e-5
CLEARLY = 1e-2

families_and_kernels = pytest.mark.parametrize(("name", "kernel"), CASES)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def plain_logits(model: PreTrainedModel, ids: list[int], padding: int = 0) -> Tensor:
    present = torch.tensor([[0] * padding + [1] * (len(ids) - padding)])
    positions = (present.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), attention_mask=present, position_ids=positions).logits[0]


def largest_difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def llama_by_hand(
    model: PreTrainedModel, ids: list[int], layer: int, removed: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """A Llama forward from its published equations, float64, that really drops tokens after ``layer``.

    Returns:
        logits ``[retained, vocabulary]``, and per layer the attention ``[query heads, rows, keys]`` over what it held.
    """
    config, weight = model.config, {key: value.double() for key, value in model.state_dict().items()}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    positions = torch.arange(len(ids))
    states = weight["model.embed_tokens.weight"][torch.tensor(ids)]
    attentions = []

    def rms(states: Tensor, gain: Tensor) -> Tensor:
        return states / (states.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * gain

    def rotate(vectors: Tensor) -> Tensor:
        half = torch.arange(size // 2, dtype=torch.float64)
        angles = positions.double()[:, None] * 10_000.0 ** (-2 * half / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = vectors[..., : size // 2], vectors[..., size // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        normed = rms(states, weight[prefix + "input_layernorm.weight"])
        query, key, value = (
            (normed @ weight[f"{prefix}self_attn.{letter}_proj.weight"].T).view(len(states), count, size)
            for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        query, key = rotate(query), rotate(key)
        mixed, probabilities = torch.zeros_like(query), []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = query[:, head] @ key[:, group].T / math.sqrt(size)
            scores = scores.masked_fill(positions[:, None] < positions[None, :], -math.inf)
            probabilities.append(scores.softmax(-1))
            mixed[:, head] = probabilities[-1] @ value[:, group]
        attentions.append(torch.stack(probabilities))
        states = states + mixed.flatten(1) @ weight[prefix + "self_attn.o_proj.weight"].T
        normed = rms(states, weight[prefix + "post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(normed @ weight[prefix + "mlp.gate_proj.weight"].T)
        up = normed @ weight[prefix + "mlp.up_proj.weight"].T
        states = states + (gate * up) @ weight[prefix + "mlp.down_proj.weight"].T
        if number == layer:
            retained = [index for index in range(len(ids)) if index not in set(removed)]
            states, positions = states[retained], positions[retained]
    return rms(states, weight["model.norm.weight"]) @ weight["lm_head.weight"].T, attentions


@families_and_kernels
@pytest.mark.parametrize("prompt", [LONG, SHORT], ids=["above the window", "below the window"])
def test_with_nothing_removed_it_is_the_plain_run(name: str, kernel: str, prompt: Prompt) -> None:
    model = shared(name, kernel)
    masked = masked_full_run(model, prompt.ids, FAMILIES[name].windows, layer=1)
    assert largest_difference(masked, plain_logits(model, prompt.ids)) < ROUNDING


@families_and_kernels
def test_removing_after_the_last_layer_removes_nothing(name: str, kernel: str) -> None:
    model, windows = shared(name, kernel), FAMILIES[name].windows
    removed = LONG.tokens_of((1, 3))
    masked = masked_full_run(model, LONG.ids, windows, LAYERS - 1, removed)
    assert largest_difference(masked, plain_logits(model, LONG.ids)) < ROUNDING


@families_and_kernels
def test_a_token_removed_at_every_layer_has_no_influence(name: str, kernel: str) -> None:
    model, windows = shared(name, kernel), FAMILIES[name].windows
    removed = LONG.tokens_of((1, 3))
    retained = [index for index in range(LONG.n) if index not in removed]
    others = [(token + 7) % 128 if index in removed else token for index, token in enumerate(LONG.ids)]
    first, second = (masked_full_run(model, ids, windows, -1, removed)[retained] for ids in (LONG.ids, others))
    assert largest_difference(first, second) < ROUNDING
    seen = (masked_full_run(model, ids, windows, 1, removed)[-1] for ids in (LONG.ids, others))
    assert largest_difference(*seen) > CLEARLY


@families_and_kernels
def test_padding_on_the_left_changes_no_logit(name: str, kernel: str) -> None:
    model, windows = shared(name, kernel), FAMILIES[name].windows
    removed = LONG.tokens_of((1, 3))
    shifted = [token + 5 for token in removed]
    bare = masked_full_run(model, LONG.ids, windows, 1, removed)[-8:]
    padded = masked_full_run(model, [0] * 5 + LONG.ids, windows, 1, shifted, padding=5)[-8:]
    assert largest_difference(bare, padded) < ROUNDING


@families_and_kernels
def test_the_plain_run_of_a_padded_prompt_is_the_masked_one(name: str, kernel: str) -> None:
    model, ids = shared(name, kernel), [0] * 5 + LONG.ids
    masked = masked_full_run(model, ids, FAMILIES[name].windows, 1, padding=5)[5:]
    assert largest_difference(masked, plain_logits(model, ids, padding=5)[5:]) < ROUNDING


@families_and_kernels
def test_its_greedy_tokens_with_nothing_removed_are_those_of_generate(name: str, kernel: str) -> None:
    model = shared(name, kernel)
    ids = torch.tensor([LONG.ids])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9)[0, LONG.n :].tolist()
    assert reference_generate(model, LONG.ids, FAMILIES[name].windows, 1, (), 9) == plain


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if any(family.windows)])
def test_the_windows_of_the_table_matter(name: str) -> None:
    model, windows = shared(name, "eager"), FAMILIES[name].windows
    by_window = [masked_full_run(model, LONG.ids, windows, 1), masked_full_run(model, LONG.ids, FULL, 1)]
    assert largest_difference(*by_window) > CLEARLY
    one_wider = tuple(window and window + 1 for window in windows)
    assert largest_difference(by_window[0], masked_full_run(model, LONG.ids, one_wider, 1)) > CLEARLY


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("layer", [0, 1, 3, 4])
def test_masking_equals_dropping_in_a_llama_written_by_hand(kernel: str, layer: int) -> None:
    model, ids = shared("llama", kernel), [*LONG.ids, 11, 12, 13]
    removed = LONG.tokens_of((0, 2, 4))
    by_hand, _ = llama_by_hand(model, ids, layer, removed)
    masked = reference_logits(model, ids, FULL, layer, removed, LONG.n)
    assert masked.shape == (4, 128)
    assert largest_difference(masked, by_hand[-4:].float()) < ROUNDING
    assert largest_difference(masked, plain_logits(model, ids)[-4:]) > CLEARLY


def test_attention_rows_equal_those_of_a_llama_written_by_hand() -> None:
    model, rows = shared("llama", "eager"), torch.tensor([0, 17, LONG.n - 2, LONG.n - 1])
    _, attentions = llama_by_hand(model, LONG.ids, LAYERS, [])
    for layer in range(LAYERS):
        read = reference_attention_rows(model, LONG.ids, layer, rows)
        assert largest_difference(read, attentions[layer][:, rows].float()) < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_rows_see_what_the_layers_window_lets_them(name: str) -> None:
    model, family, rows = shared(name, "eager"), FAMILIES[name], torch.tensor([3, 20, LONG.n - 1])
    for layer, window in enumerate(family.windows):
        read = reference_attention_rows(model, LONG.ids, layer, rows)
        visible = allowed_pairs(LONG.n, window, ())[rows]
        assert torch.equal(read > 0, visible.expand_as(read))
        sums = read.sum(-1)
        if family.sink_logits:
            assert bool((sums < 1).all())
            assert bool((sums < 0.99).any())
        else:
            assert torch.allclose(sums, torch.ones_like(sums))


def test_a_mask_written_out_by_hand_is_the_one_built() -> None:
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],  # padding: sees only itself
            [0, 1, 0, 0, 0, 0],
            [0, 1, 1, 0, 0, 0],  # hidden: sees itself still
            [0, 1, 0, 1, 0, 0],
            [0, 0, 0, 1, 1, 0],  # window of 3
            [0, 0, 0, 1, 1, 1],
        ],
        dtype=torch.bool,
    )
    assert torch.equal(allowed_pairs(6, 3, hidden=[2], padding=1), expected)


def test_the_window_of_the_tests_lies_between_their_prompts() -> None:
    assert SHORT.n < WINDOW < LONG.n
