"""The methods that are compared: what each is, where it comes from, and with which settings it runs.

Those of other papers are written from the papers' descriptions, at the level of chunks: whole passages stay or go.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from entroprefill_rag.bench.budget import savings
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import ConfigError

Kind = Literal["full", "pruned", "ranked", "second_pass", "compressed", "oracle", "none"]
QUICK = ("full", "ours", "random", "embedder", "midprefill-mean", "second-pass", "gold", "none")
CAPS = (0.1, 0.3, 0.5)


@dataclass(frozen=True)
class Method:
    """One way to answer.

    Attributes:
        name: on the command line and in tables.
        what: what it does, in a line.
        origin: where it comes from.
        kind: how it is run.
        settings: of a ``PruningConfig``, for what runs through the engine.
        ranker: of kind 'ranked': what orders the chunks.
    """

    name: str
    what: str
    origin: str
    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranker: str = ""

    @cached_property
    def config(self) -> PruningConfig:
        """The configuration; of those that do not prune in mid-prefill, with pruning off."""
        return PruningConfig.model_validate(self.settings or {"enabled": False})

    @cached_property
    def digest(self) -> str:
        """Changes whenever the settings do."""
        told = [self.name, self.kind, self.ranker, self.config.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def seeded(self, seed: int) -> PruningConfig:
        """The configuration with a seed of its own for the audit's draws."""
        return self.config.model_copy(update={"audit": self.config.audit.model_copy(update={"seed": seed})})


def choice_by_attention(layer: int, rows: int, budget: float) -> dict[str, Any]:
    """Mean attention of all heads at one layer chooses, and nothing holds it back: caps and audit always pass."""
    return {
        **savings(budget),
        "layers": [layer],
        "proposal_rows": rows,
        "head_weights": "uniform",
        "evidence": "layer",
        "reach": "all",
        "mass_min": 0.0,
        "mu_min": 1e-9,
        "alpha": 1e-9,
        "lam": 0.0,
        "eps_row": 1.0,
        "decode_monitor": False,
        "dual_bound": "never",
        "audit": {"observers": [{"kind": "suffix_rows"}], "eps_audit": 1 - 1e-9, "method": "enumerate"},
    }


def catalogue(*, layer: int, budget: float, cross_encoders: Sequence[str] = ()) -> dict[str, Method]:
    """All methods by name, in the order of the tables.

    Args:
        layer: where attention chooses, for the methods of other papers.
        budget: share of the chunk tokens that may be kept.
        cross_encoders: names or folders; each is a method of its own.
    """
    base = savings(budget)
    made = [
        Method("full", "All chunks, prefilled in full.", "What everything is compared with.", "full"),
        Method("ours", "Default settings, with the model's profile where it has one.", "EntroPrefill", "pruned", base),
        Method(
            "layer",
            "The defaults, ordered by the monitored layer's own rows alone.",
            "EntroPrefill, ablation",
            "pruned",
            {**base, "evidence": "layer"},
        ),
    ]
    for cap in CAPS:
        made.append(
            Method(
                f"cap-{cap:g}",
                f"The defaults with caps and audit limit at {cap:g} (default {PruningConfig().eps_row:g}).",
                "EntroPrefill",
                "pruned",
                {**base, "eps_row": cap, "audit": {"eps_audit": cap}},
            )
        )
    made += [
        Method(
            "paper",
            "Renyi weights inside each GQA group over all tokens outside the sinks, greedy over all chunks, Hoeffding.",
            "EntroPrefill, as its paper has it",
            "pruned",
            {
                **base,
                "head_weights": "renyi",
                "entropy_over": "outside_sinks",
                "evidence": "layer",
                "reach": "all",
                "audit": {"bound": "hoeffding"},
            },
        ),
        Method("random", "Chunks drawn at random, then a short prompt.", "A floor.", "ranked", ranker="random"),
        Method(
            "first",
            "The first chunks in retrieval order, then a short prompt.",
            "A smaller k.",
            "ranked",
            ranker="first",
        ),
        Method(
            "embedder",
            "Chunks nearest to the question by a bi-encoder, in their own order, then a short prompt.",
            "What one would do instead (sentence-transformers).",
            "ranked",
            ranker="embedder",
        ),
    ]
    made += [
        Method(
            f"cross-encoder:{name}",
            "Chunks that a cross-encoder scores highest, in their own order, then a short prompt.",
            "What one would do instead (sentence-transformers).",
            "ranked",
            ranker=name,
        )
        for name in cross_encoders
    ]
    last, mean = choice_by_attention(layer, 1, budget), choice_by_attention(layer, 16, budget)
    at = f"at layer {layer} chooses chunks; no caps, no audit"
    made += [
        Method(
            "midprefill-last",
            f"Attention of the last row, mean over heads, {at}; in mid-prefill.",
            "The rule of FastKV (arXiv 2502.01068) for chunks, with one row.",
            "pruned",
            last,
        ),
        Method(
            "midprefill-mean",
            f"Attention of the last 16 rows, mean over heads, {at}; in mid-prefill.",
            "The rule of FastKV (arXiv 2502.01068) for chunks.",
            "pruned",
            mean,
        ),
        Method(
            "second-pass",
            f"Attention of the last 16 rows, mean over heads, {at}; then a second prefill of the short prompt.",
            "The way of GemFilter (arXiv 2409.17422) for chunks.",
            "second_pass",
            mean,
        ),
        Method(
            "llmlingua",
            "Token-level compression of the chunks with the same model, question-aware, then a short prompt.",
            "LongLLMLingua (arXiv 2310.06839) through the llmlingua package.",
            "compressed",
        ),
        Method("gold", "The gold chunks alone: needs labels, no method.", "An oracle.", "oracle"),
        Method("none", "No chunk at all: what the model knows by itself.", "A floor.", "none"),
    ]
    return {method.name: method for method in made}


def chosen(known: Mapping[str, Method], names: Sequence[str]) -> list[Method]:
    """The methods of these names, the full run always among them.

    Raises:
        ConfigError: a name that is none.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"there is no method {unknown[0]!r}; choose from {', '.join(known)}")
    wanted = {"full", *names} if names else set(known)
    return [method for name, method in known.items() if name in wanted]
