"""Every number the method has: named, bounded and explained, in one place.

Symbols in brackets are those of ``docs/guarantees.md``. Defaults that come from measurements say which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SuffixRows(_Settings):
    """Observers: the rows of the suffix (user query and template tail), uniformly weighted."""

    kind: Literal["suffix_rows"] = "suffix_rows"


class WeightedRows(_Settings):
    """Observers: the rows of the suffix, weighted geometrically towards its end."""

    kind: Literal["weighted_rows"] = "weighted_rows"
    decay: float = Field(default=0.8, gt=0.0, le=1.0, description="Weight of a row relative to the row after it.")


class PromptRows(_Settings):
    """Observers: all rows of the document block and the suffix; a removed row loses nothing (section 6)."""

    kind: Literal["prompt_rows"] = "prompt_rows"


class ProbeQueries(_Settings):
    """Observers: other questions over the same documents; one probe is one observer (correction 8).

    A probe's rows see the chunks and the probe itself, never the user's query. What it loses is the mean over its rows,
    so that observers are independent. Each probe runs through the shallow layers: this is the dearest distribution.
    The user's own question may be in the bank; it is then a probe like any other. Without `include_text`, a record
    holds the questions as digests, and names probes by their place in the bank.
    """

    kind: Literal["probe_queries"] = "probe_queries"
    queries: tuple[str, ...] = Field(
        min_length=2, max_length=4096, description="The bank of questions, uniformly weighted; chosen beforehand."
    )

    @property
    def digests(self) -> tuple[str, ...]:
        """What a record holds instead of the questions: ``sha256:`` and 16 hexadecimal digits of each."""
        return tuple(f"sha256:{hashlib.sha256(query.encode()).hexdigest()[:16]}" for query in self.queries)

    @field_validator("queries")
    @classmethod
    def _questions_differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        blank = next((i for i, text in enumerate(value) if not text.strip()), None)
        if blank is not None:
            raise ValueError(f"probe {blank} of the bank is empty; a probe is a question")
        if len(set(value)) < len(value):
            twice = next(text for i, text in enumerate(value) if text in value[:i])
            raise ValueError(f"the bank holds {twice!r} twice; weigh all probes the same, or leave one out")
        return value


Observer = Annotated[SuffixRows | WeightedRows | PromptRows | ProbeQueries, Field(discriminator="kind")]


class AuditConfig(_Settings):
    """The audit: which observers look, how much they may lose on average, and how sure one is (section 6)."""

    observers: tuple[Observer, ...] = Field(
        default=(SuffixRows(), PromptRows()),
        min_length=1,
        description="Query-observer distributions [nu]; every one of them must pass. `delta` is split evenly "
        "between the sampled ones; an enumerated one needs none.",
    )
    eps_audit: float = Field(
        default=0.2, gt=0.0, lt=1.0, description="Largest mean discarded mass per head [eps_audit]."
    )
    delta: float = Field(
        default=0.05, gt=0.0, lt=1.0, description="Probability, per attempted request, of accepting falsely [delta]."
    )
    m_a: int | Literal["auto"] = Field(
        default="auto",
        description="Observers drawn per sampled distribution [m_a]; 'auto' takes twice the smallest number that "
        "could pass at all, four times where the audit is `sequential` (it stops at what it needs), at least 64.",
    )
    bound: Literal["hoeffding", "kl", "empirical_bernstein", "betting"] = Field(
        default="betting",
        description="One-sided concentration bound for sampled audits. 'hoeffding' is the paper's; all are valid.",
    )
    method: Literal["auto", "enumerate", "sample"] = Field(
        default="auto",
        description="'enumerate' reads the whole support (exact mean), 'sample' draws from it, 'auto' enumerates a "
        "support no larger than `m_a`.",
    )
    union: Literal["layers_and_heads", "layers"] = Field(
        default="layers_and_heads",
        description="What the union bound runs over: layers and heads (the paper's constant), or layers only, which "
        "suffices for the decision to accept because every head must pass.",
    )
    sequential: bool = Field(
        default=False,
        description="Look at the draws in batches and stop as soon as every head passes or some head can no longer "
        "pass; needs the 'betting' bound, which holds at all times at once. `m_a` is then the most that are drawn.",
    )
    attempts: Literal["each", "all"] = Field(
        default="each",
        description="What `delta` covers: each attempt at a prompt by itself, or all attempts at it together; the r-th "
        "then spends delta / (r (r + 1)). Needs the backend's ledger to have seen them all.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        description="Seed of the audit's draws; None takes fresh randomness from the operating system. A fixed seed "
        "is for replay: it gives no protection against somebody who knows it.",
    )

    @field_validator("m_a")
    @classmethod
    def _enough_observers(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError(f"m_a must be at least 2 (or 'auto'), got {value}")
        return value

    @model_validator(mode="after")
    def _sequential_is_betting(self) -> AuditConfig:
        if self.sequential and self.bound != "betting":
            raise ValueError(
                f"sequential=True needs bound='betting', got {self.bound!r}: a bound for a fixed number of draws errs "
                "more often than it says when it is looked at on the way"
            )
        kinds = [observer.kind for observer in self.observers]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"observers must be of different kinds, got {', '.join(kinds)}")
        return self


class HeadProfile(_Settings):
    """Head weights of a calibrated profile, as `head_weights` takes them and a record holds them (correction 6)."""

    kind: Literal["profile"] = "profile"
    name: str = Field(min_length=1, description="Names the profile: its model and the digest of its content.")
    weights: tuple[tuple[int, tuple[float, ...]], ...] = Field(
        description="Per layer, its index and `v` of every query head: nonnegative, summing to 1 over the layer. "
        "Layers that are not named are weighted as 'renyi' does."
    )
    pooled: tuple[tuple[int, tuple[tuple[int, int, float], ...]], ...] = Field(
        default=(),
        description="Per layer, its index and the heads, of it and of layers before, whose attention ranks the chunks "
        "there: layer, head, share; the shares of a layer sum to 1. Layers that are not named rank by their own heads.",
    )

    def heads_at(self, layer: int) -> tuple[tuple[int, int, float], ...]:
        """Layer, head and share of every head that ranks the chunks at ``layer``; none where its own weights do."""
        return next((heads for known, heads in self.pooled if known == layer), ())

    def at(self, layer: int) -> tuple[float, ...] | None:
        """``v`` of every query head of a layer; None where the profile does not know it."""
        return next((v for known, v in self.weights if known == layer), None)

    @field_validator("weights")
    @classmethod
    def _weights_are_shares(
        cls, value: tuple[tuple[int, tuple[float, ...]], ...]
    ) -> tuple[tuple[int, tuple[float, ...]], ...]:
        for layer, v in value:
            if not v or any(not 0.0 <= share <= 1.0 for share in v) or abs(sum(v) - 1.0) > 1e-6:
                raise ValueError(f"the weights of layer {layer} must be nonnegative and sum to 1, got {v}")
        layers = [layer for layer, _ in value]
        if layers != sorted(set(layers)):
            raise ValueError(f"layers must ascend without repeats, got {layers}")
        return value

    @field_validator("pooled")
    @classmethod
    def _pooled_heads_come_before(
        cls, value: tuple[tuple[int, tuple[tuple[int, int, float], ...]], ...]
    ) -> tuple[tuple[int, tuple[tuple[int, int, float], ...]], ...]:
        for layer, heads in value:
            places = [head[:2] for head in heads]
            good = bool(heads) and len(set(places)) == len(places) and all(head[2] > 0.0 for head in heads)
            if not good or abs(sum(head[2] for head in heads) - 1.0) > 1e-6:
                raise ValueError(f"the heads that rank chunks at layer {layer} need shares that sum to 1, got {heads}")
            if any(not 1 <= at <= layer or head < 0 for at, head in places):
                raise ValueError(f"at layer {layer} only heads of layers 1 to {layer} have been seen, got {places}")
        layers = [layer for layer, _ in value]
        if layers != sorted(set(layers)):
            raise ValueError(f"layers must ascend without repeats, got {layers}")
        return value


class PruningConfig(_Settings):
    """What may be removed, when, and under which limits."""

    enabled: bool = Field(default=True, description="False prefills in full and records that pruning was off.")
    layers: tuple[int, ...] | Literal["auto"] = Field(
        default="auto",
        description="Monitored layers [M], counted from 0, ascending; never layer 0 and never the last. 'auto' takes "
        "those of the profile that weighs the heads, else at most eight layers that see all chunks, between 45% and "
        "80% of the stack, or from a quarter of it on where few layers attend globally.",
    )
    sink_tokens: int = Field(
        default=4, ge=0, le=64, description="First tokens of the prompt that are protected and left out of masses."
    )
    proposal_rows: int = Field(
        default=16,
        ge=1,
        le=256,
        description="Most query rows the proposal reads [W_p]: the last of the suffix, and at most half of it.",
    )
    head_weights: Literal["auto", "renyi", "uniform", "profile"] | HeadProfile | Callable[..., Any] = Field(
        default="auto",
        description="How heads are weighted [v], which decides the order of removal only. 'renyi' is the paper's, "
        "inside each GQA group; 'profile' takes the heads that a calibrated profile of this model picks, over the "
        "whole layer; 'auto' takes the profile where there is one for the model's fingerprint, else 'renyi'. A profile "
        "also gives `layers` (where 'auto') and, where they are left at their defaults, `mu_min` and `mass_min`. "
        "A record holds what was used. A callable receives the "
        "entropies and the eligibility, both [groups, heads per group], and returns nonnegative weights of that shape.",
    )
    evidence: Literal["auto", "layer"] = Field(
        default="auto",
        description="What ranks the chunks at a layer: 'auto' takes what the question's own rows look at beyond the "
        "rows before it, in the heads of this and earlier layers that a profile names (`head_weights`); 'layer' takes "
        "the proposal rows in the layer's own weighted heads alone, as does 'auto' without a profile. Caps, envelope "
        "and audit are always those of the layer itself.",
    )
    entropy_over: Literal["outside_sinks", "documents"] = Field(
        default="documents",
        description="Tokens over which eligibility and Renyi entropy are taken; 'outside_sinks' is the paper's. "
        "Over 'documents' a head locked on a delimiter is not mistaken for a focused one.",
    )
    tau: float = Field(default=1.0, gt=0.0, le=100.0, description="Temperature of the head weights [tau].")
    zeta: float = Field(default=0.1, gt=0.0, le=1.0, description="Floor of the head weights [zeta].")
    mu_min: float = Field(
        default=0.05, gt=0.0, lt=1.0, description="Least mass (see `entropy_over`) of an eligible head [mu_min]."
    )
    mass_min: float = Field(
        default=0.1,
        ge=0.0,
        lt=1.0,
        description="Least mean mass of the proposal rows on chunk tokens outside the sinks, for a layer to propose. "
        "Rejects layers that look at sinks only, whose choice is as good as random.",
    )
    alpha: float = Field(
        default=0.01,
        gt=0.0,
        le=10.0,
        description="Smoothing of relative chunk mass [alpha]; of no effect where a profile's evidence ranks.",
    )
    lam: float = Field(
        default=0.25,
        ge=0.0,
        le=10.0,
        description="Weight of within-chunk concentration [lambda]; of no effect where a profile's evidence ranks.",
    )
    eps_row: float | tuple[float, ...] = Field(
        default=0.2,
        description="Cap on the discarded mass of every head in every proposal row [eps_a]; one number, or one per "
        "proposal row counted from the end of the prompt (the last given holds for all earlier rows).",
    )
    rho: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Optional cap relative to the row's own document mass, for eligible heads [rho].",
    )
    m0: int = Field(default=2, ge=1, description="Chunks that must stay, protected ones included [m_0].")
    min_saving: float = Field(
        default=0.1, ge=0.0, lt=1.0, description="Least share of chunk tokens removed for a layer to be accepted."
    )
    target_saving: float = Field(
        default=0.5, gt=0.0, le=1.0, description="Share of chunk tokens at which removal stops."
    )
    max_saving: float = Field(default=0.75, gt=0.0, le=1.0, description="Share of chunk tokens never exceeded.")
    reach: Literal["target", "all"] = Field(
        default="target",
        description="Which chunks may go: 'target' only those that rank lowest until `target_saving` is reached, so "
        "that what a cap refuses is not made up for by chunks that rank higher; 'all' goes on to higher-ranking ones, "
        "as the paper does.",
    )
    solver: Literal["greedy", "exact"] = Field(
        default="greedy",
        description="'greedy' is the paper's; 'exact' removes the least pooled mass that reaches the target, by "
        "mixed-integer programming.",
    )
    solver_seconds: float = Field(default=5.0, gt=0.0, le=600.0, description="Time limit of one LP or MILP solve.")
    streak: int = Field(
        default=1, ge=1, le=64, description="Consecutive monitored layers that must agree; 1 switches it off."
    )
    theta: float = Field(
        default=0.2, ge=0.0, le=1.0, description="Largest Jaccard distance between sets of a streak [theta]."
    )
    dual_bound: Literal["lazy", "never"] = Field(
        default="lazy",
        description="When the dual bound of the accepted (or last) trial is computed: after the first token, or never.",
    )
    decode_monitor: bool = Field(
        default=True,
        description="While decoding, measure what each generated token's row at the accepted layer places on the "
        "removed chunks. A measurement, not a guarantee.",
    )
    drift_threshold: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="Discarded mass of a generated token's row, in any head, that counts as drift; None takes the "
        "largest `eps_row`.",
    )
    on_drift: Literal["record", "stop", "restart_full"] = Field(
        default="record",
        description="At the first token above `drift_threshold`: go on and record it, end the answer there, or answer "
        "again from a full prefill.",
    )
    overflow: Literal["error", "drop_last"] = Field(
        default="error",
        description="A prompt longer than the model's positions is refused, or its last chunks are left out and "
        "recorded as not admitted.",
    )
    include_text: bool = Field(
        default=False, description="Put chunk, query and answer text into the record (off: ids, numbers, hashes)."
    )
    audit: AuditConfig = Field(default_factory=AuditConfig, description="The audit of a proposal.")

    @field_validator("layers")
    @classmethod
    def _layers_ascend(cls, value: tuple[int, ...] | str) -> tuple[int, ...] | str:
        if isinstance(value, tuple):
            if not value:
                raise ValueError("layers is empty; name at least one monitored layer, or use 'auto'")
            if list(value) != sorted(set(value)):
                raise ValueError(f"layers must ascend without repeats, got {value}")
            if value[0] < 1:
                raise ValueError(
                    f"layer {value[0]} may not be monitored: positions are read from layer 0, which must stay full"
                )
        return value

    @field_validator("eps_row")
    @classmethod
    def _caps_are_masses(cls, value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        caps = value if isinstance(value, tuple) else (value,)
        if not caps or any(not 0.0 < cap <= 1.0 for cap in caps):
            raise ValueError(f"eps_row must lie in (0, 1], got {value}")
        return value

    @model_validator(mode="after")
    def _drift_is_watched(self) -> PruningConfig:
        if self.on_drift != "record" and not self.decode_monitor:
            raise ValueError(f"on_drift={self.on_drift!r} needs decode_monitor=True")
        return self

    @model_validator(mode="after")
    def _savings_are_ordered(self) -> PruningConfig:
        if not self.min_saving <= self.target_saving <= self.max_saving:
            raise ValueError(
                "savings must satisfy min_saving <= target_saving <= max_saving, got "
                f"{self.min_saving}, {self.target_saving}, {self.max_saving}"
            )
        return self

    @field_serializer("head_weights")
    def _name_of_weights(self, value: Any) -> str | dict[str, Any]:
        if isinstance(value, HeadProfile):
            return value.model_dump(mode="json")
        return value if isinstance(value, str) else f"callable:{getattr(value, '__qualname__', type(value).__name__)}"
