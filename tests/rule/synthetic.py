"""Synthetic prompts and attention for the tests of the rule: small, causal, and known in every entry."""

from __future__ import annotations

import torch

from entroprefill_rag.config import AuditConfig, PromptRows, PruningConfig, SuffixRows
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.rule.masses import chunk_membership, row_masses

HEADS, GROUPS = 4, 2
PREFIX, DELIMITER = 6, 1


def auditing(**changes):
    """An audit with the numbers these tests reckon with, whatever the defaults are."""
    fixed = {"eps_audit": 0.15, "delta": 0.05, "bound": "betting", "observers": (SuffixRows(), PromptRows())}
    return AuditConfig(**{**fixed, "union": "layers_and_heads", **changes})


def pruning(**changes):
    """A configuration with the numbers these tests reckon with, whatever the defaults are."""
    fixed = {
        "tau": 1.0,
        "zeta": 0.1,
        "mu_min": 0.05,
        "mass_min": 0.1,
        "eps_row": 0.3,
        "m0": 2,
        "min_saving": 0.1,
        "target_saving": 0.5,
        "max_saving": 0.75,
        "streak": 1,
        "theta": 0.2,
        "audit": auditing(),
    }
    return PruningConfig(**{**fixed, **changes})


def layout(lengths=(10, 10, 10, 10, 10, 10), *, suffix=12, protected=(), sinks=4):
    """A prompt of chunks of these lengths, between a prefix of 6 tokens and a suffix."""
    spans, at = [], PREFIX
    for length in lengths:
        spans.append((at, at + length))
        at += length + DELIMITER
    n = at + suffix
    free = {token for i, (start, end) in enumerate(spans) if i not in protected for token in range(start, end)}
    return PromptLayout(
        input_ids=tuple(range(n)),
        chunk_ids=tuple(f"c{i}" for i in range(len(lengths))),
        chunk_spans=tuple(spans),
        protected=tuple(token not in free for token in range(n)),
        protected_reasons=tuple("asked for" if i in protected else None for i in range(len(lengths))),
        sink_tokens=sinks,
        suffix_span=(n - suffix, n),
        rendered="",
    )


def attention(prompt, chunk_mass, *, rows=None, jitter=0.0, seed=0):
    """Causal attention ``[HEADS, n, n]`` that places ``chunk_mass[i]`` on chunk ``i``, the rest on the first token.

    Args:
        prompt: the layout.
        chunk_mass: ``[k]``, the same for every head and for all rows after the chunk.
        rows: other masses for some rows, position -> ``[k]``.
        jitter: relative spread over the tokens of a chunk, different per head.
        seed: of the jitter.
    """
    n = prompt.n_tokens
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(HEADS, n, n)
    spread = 1.0 + jitter * torch.rand(HEADS, n, generator=generator)
    for row in range(n):
        wanted = (rows or {}).get(row, chunk_mass)
        for (start, end), mass in zip(prompt.chunk_spans, wanted, strict=True):
            if end <= row:
                share = spread[:, start:end]
                weights[:, row, start:end] = mass * share / share.sum(-1, keepdim=True)
        weights[:, row, 0] = 1.0 - weights[:, row].sum(-1)
    return weights


class Reader:
    """Reads rows of an attention matrix as the engine would, and remembers which."""

    def __init__(self, prompt, weights):
        self.weights = weights
        self.membership = chunk_membership(prompt.chunk_spans, prompt.n_tokens, first=prompt.sink_tokens)
        self.calls = []

    def __call__(self, rows, want_tokens):
        self.calls.append((tuple(rows.tolist()), want_tokens))
        return row_masses(self.weights[:, rows], self.membership, want_tokens=want_tokens)
