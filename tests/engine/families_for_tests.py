"""Tiny random causal models, one per family, and small prompts, with all a test must know of them written down by hand.

Nothing here is read from the engine, and the attention window of every layer is spelled out instead of derived from
the model's configuration: a test that compares with these tables does not repeat a mistake of the code under test.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 128
LAYERS = 6
QUERY_HEADS = 4
KV_HEADS = 2
WINDOW = 12
_GAIN = 1.2  # of every linear map: attention is far from uniform, and far from one-hot

Windows = tuple[int | None, ...]

FULL: Windows = (None,) * LAYERS
SLIDING: Windows = (WINDOW,) * LAYERS
ALTERNATING: Windows = (WINDOW, None) * (LAYERS // 2)
FIVE_TO_ONE: Windows = (WINDOW,) * (LAYERS - 1) + (None,)
FULL_THEN_SLIDING: Windows = (None,) * 3 + (WINDOW,) * 3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": QUERY_HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """One model family as the tests see it.

    Attributes:
        name: how the tests name it; ``model_type`` of transformers, sometimes with a variant.
        config_class: name of the configuration class in transformers.
        options: what the configuration says beyond the common sizes.
        windows: per layer, the keys a row may see including itself, or None for all earlier ones.
        kernels: attention implementations the family may run with.
        prune_layers: layers after which the tests remove tokens. Under sliding windows they leave enough layers above
            for a token at the start of the prompt to reach the last row.
        sink_logits: whether each head has a learnt logit in its softmax's denominator, so that rows sum to less than 1.
    """

    name: str
    config_class: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    windows: Windows = FULL
    kernels: tuple[str, ...] = ("sdpa", "eager")
    prune_layers: tuple[int, ...] = (1, 3)
    sink_logits: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt of random tokens with chunks in it.

    Attributes:
        n: number of tokens.
        chunks: half-open spans; all else is protected.
    """

    n: int
    chunks: tuple[tuple[int, int], ...]

    @property
    def ids(self) -> list[int]:
        """Token ids, ``n`` of them, none a special one."""
        generator = torch.Generator().manual_seed(self.n)
        return torch.randint(2, VOCABULARY, (self.n,), generator=generator).tolist()

    def tokens_of(self, chunks: tuple[int, ...]) -> list[int]:
        """Positions of the tokens of some chunks, ascending."""
        return [token for chunk in sorted(chunks) for token in range(*self.chunks[chunk])]


# Through three sliding layers the last row of LONG reaches the start of its first chunk: 35 - 3 * 11 = 2.
LONG = Prompt(36, ((5, 10), (11, 16), (17, 19), (20, 24), (25, 30)))
# Below the window when prefilled, above it before eight tokens are generated.
SHORT = Prompt(WINDOW - 1, ((4, 6), (6, 7), (7, 9)))


def _layer_types(windows: Windows) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


_SLIDING = {"sliding_window": WINDOW}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh", **_SLIDING}
_EXPERTS = {"num_experts_per_tok": 2}

_TABLE = (
    Family("llama", "LlamaConfig"),
    Family("mistral", "MistralConfig", _SLIDING, windows=SLIDING, prune_layers=(1, 2)),
    Family("qwen2", "Qwen2Config"),
    Family(
        "qwen2-half-sliding",
        "Qwen2Config",
        {"use_sliding_window": True, "max_window_layers": 3, **_SLIDING},
        windows=FULL_THEN_SLIDING,
        prune_layers=(1, 2),
    ),
    Family("qwen3", "Qwen3Config", {"head_dim": 8}),
    Family("phi3", "Phi3Config"),
    Family("phi3-sliding", "Phi3Config", _SLIDING, windows=SLIDING, prune_layers=(1, 2)),
    Family(
        "gemma2",
        "Gemma2Config",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0},
        windows=ALTERNATING,
        # sdpa has no soft-cap: refused from transformers 5, silently dropped before.
        kernels=("eager",),
    ),
    Family("gemma3", "Gemma3TextConfig", {**_GEMMA, "layer_types": _layer_types(FIVE_TO_ONE)}, windows=FIVE_TO_ONE),
    Family(
        "gemma3-alternating",
        "Gemma3TextConfig",
        {**_GEMMA, "layer_types": _layer_types(ALTERNATING)},
        windows=ALTERNATING,
    ),
    Family("olmo2", "Olmo2Config"),
    Family("smollm3", "SmolLM3Config", {"no_rope_layers": [1, 1, 0, 1, 1, 0]}),
    Family(
        "granite",
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.25,
        },
    ),
    Family("mixtral", "MixtralConfig", {"num_local_experts": 4, "sliding_window": None, **_EXPERTS}),
    Family(
        "qwen3-moe",
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, **_EXPERTS},
    ),
    Family(
        "gpt-oss",
        "GptOssConfig",
        # As many positions as its default RoPE scaling was made for.
        {"head_dim": 8, "num_local_experts": 4, "max_position_embeddings": 131_072, **_SLIDING, **_EXPERTS},
        windows=ALTERNATING,
        kernels=("eager",),
        sink_logits=True,
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _TABLE}
CASES: list[tuple[str, str]] = [(family.name, kernel) for family in _TABLE for kernel in family.kernels]


def build(name: str, kernel: str) -> PreTrainedModel:
    """A new tiny model: float32, on the CPU, in evaluation mode, the same weights for the same ``name`` always.

    Args:
        name: a key of ``FAMILIES``.
        kernel: one of the family's ``kernels``.
    """
    family = FAMILIES[name]
    config = getattr(transformers, family.config_class)(**{**_COMMON, **family.options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel, dtype=torch.float32)
    _draw_weights(model, name)
    # No token ends an answer: every test counts on all steps being taken.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False
    return model.eval()


@cache
def shared(name: str, kernel: str) -> PreTrainedModel:
    """The model of ``build``, built once per session: for tests that leave it as they found it."""
    return build(name, kernel)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: for models this small, handing work to a second one costs many times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _draw_weights(model: PreTrainedModel, seed_name: str) -> None:
    """Weights that make attention uneven, and leave no norm, bias or sink at a value that would hide it."""
    seed = zlib.crc32(seed_name.encode())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed + zlib.crc32(parameter_name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in parameter_name:
                # Where the embedding is also the head, a unit one would let the last token decide every answer.
                parameter.copy_(noise * (parameter.shape[-1] ** -0.5 if tied else 1.0))
            elif parameter_name.endswith("sinks"):
                parameter.copy_(noise)
            elif "norm" in parameter_name:
                parameter.add_(0.2 * noise)
            elif parameter.dim() == 1 or parameter_name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * (_GAIN / math.sqrt(parameter.shape[-1])))
