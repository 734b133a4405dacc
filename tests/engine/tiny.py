"""A tiny random chat model with a byte-level tokenizer: real code paths, a few milliseconds a run."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from entroprefill_rag import AuditConfig, Chunk, PruningConfig, RagRequest
from entroprefill_rag.config import PromptRows, SuffixRows

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Caps that a random model, whose attention is spread evenly, passes at the first monitored layer.
LOOSE = PruningConfig(
    layers=(2, 3),
    eps_row=1.0,
    mass_min=0.0,
    mu_min=1e-6,
    audit=AuditConfig(eps_audit=0.95, m_a=64, observers=(SuffixRows(), PromptRows())),
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, with ChatML's special tokens and template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = CHATML
    return made


def model(kernel: str = "sdpa", *, layers: int = 6, seed: int = 0) -> LlamaForCausalLM:
    """A Llama with random weights, large enough for attention to differ between heads."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            initializer_range=0.3,
            eos_token_id=257,
            pad_token_id=258,
            attn_implementation=kernel,
        )
        made = LlamaForCausalLM(config).eval()
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 258
    return made


def request(chunks: int = 5, words: int = 6, **more: object) -> RagRequest:
    """A question over ``chunks`` short chunks."""
    return RagRequest(
        instruction="Answer.",
        chunks=[
            Chunk(id=f"c{i}", title=f"title {i}", text=" ".join(f"word{i}{j}" for j in range(words)))
            for i in range(chunks)
        ],
        query="Which word is it, then?",
        **more,
    )
