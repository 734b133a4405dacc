"""A model's profile: what it holds, how it is read and written, and how it enters a configuration.

Heads of a layer are weighed ``w = (1 - zeta) v + zeta / H_Q`` over the whole layer (correction 6); a profile is found
by the fingerprint of configuration and tokenizer, which says nothing of the weights (decision 10).
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from entroprefill_rag.certificate.result import Certificate
from entroprefill_rag.config import HeadProfile, PruningConfig
from entroprefill_rag.errors import ProfileError

PROFILE_VERSION = "1"


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(_Entry):
    """A mean over training questions and its 95% interval (bootstrap over questions)."""

    mean: float
    low: float
    high: float
    n: int = Field(description="Questions.")


class CapCurve(_Entry):
    """What one row cap allowed at one layer, in the profile's order, with a target of half the chunk tokens."""

    cap: float
    saved: float = Field(description="Mean share of chunk tokens removed.")
    gold_kept: float = Field(description="Mean share of gold chunks that stayed.")


class LayerEvidence(_Entry):
    """What was measured at one layer."""

    layer: int
    doc_mass: float = Field(description="Mean mass of the proposal rows on chunk tokens, over heads and questions.")
    doc_mass_low: float = Field(description="Its 5% quantile over questions.")
    uniform: Estimate = Field(description="Recall of gold at a quarter of the chunks, all heads weighed alike.")
    renyi: Estimate = Field(description="The same with Renyi weights.")
    profile: Estimate = Field(description="The same with picked heads, chosen on other questions (cross-validated).")
    pooled: Estimate = Field(
        description="The same with the evidence of heads picked from this and all earlier layers: what the question's "
        "rows place on a chunk beyond the rows before it; chosen on other questions (cross-validated)."
    )
    hard: Estimate | None = Field(
        default=None,
        description="The same on questions whose sentence was taken out of its chunk, which no head was picked by; "
        "None where there were none.",
    )
    uniform_auc: float = Field(description="Chance that a gold chunk scores above another, all heads alike.")
    profile_auc: float = Field(description="The same, picked heads, cross-validated.")
    pooled_auc: float = Field(description="The same, heads of this and earlier layers, cross-validated.")
    head_auc: tuple[float, ...] = Field(description="The same for the evidence of every head by itself.")
    head_mass: tuple[float, ...] = Field(description="Mean mass on chunk tokens of every head.")
    heads: int = Field(description="How many heads cross-validation picks; H_Q where picking does not help.")
    v: tuple[float, ...] = Field(description="Weights v of the heads; they sum to 1.")
    caps: tuple[CapCurve, ...]


class Training(_Entry):
    """Where the evidence comes from."""

    source: str = Field(description="'packaged', or what the documents were.")
    questions: int = Field(description="That heads and layers were picked by, hard ones left out.")
    seed: int
    forms: dict[str, int] = Field(description="Questions of each form, hard ones left out.")
    hard: int = Field(default=0, description="Questions whose sentence was taken out of its chunk: only measured.")
    folds: int
    tokens: tuple[int, int] = Field(description="Shortest and longest prompt.")
    chance: float = Field(description="Recall of a random choice of a quarter of the chunks.")


class ModelProfile(_Entry):
    """The layers and heads of a model that find evidence, with the evidence for that."""

    version: Literal["1"] = "1"
    model: str
    fingerprints: tuple[str, ...] = Field(
        min_length=1,
        description="Of configuration and tokenizer; one for each way transformers writes a configuration.",
    )
    dtype: str
    query_heads: int
    kv_heads: int
    depth: int = Field(description="Layers of the model.")
    layers: tuple[int, ...] = Field(min_length=1, description="Monitored layers, ascending.")
    weights: tuple[tuple[int, tuple[float, ...]], ...] = Field(description="Per layer, v of every query head.")
    pooled: tuple[tuple[int, tuple[tuple[int, int, float], ...]], ...] = Field(
        default=(), description="Per layer, the heads of it and of earlier ones that rank chunks: layer, head, share."
    )
    mass_min: float = Field(ge=0.0, lt=1.0)
    mu_min: float = Field(gt=0.0, lt=1.0)
    caps: dict[str, float] = Field(
        description="Suggested `eps_row` and `eps_audit` for a wanted share of chunk tokens removed; applied by nobody "
        "but the caller: a cap says what may be lost."
    )
    training: Training
    evidence: tuple[LayerEvidence, ...]
    versions: dict[str, str] = Field(default_factory=dict)
    certificates: tuple[Certificate, ...] = Field(
        default=(), description="Of workloads measured with this profile (`entroprefill certify --into`)."
    )

    @model_validator(mode="after")
    def _fits_itself(self) -> ModelProfile:
        HeadProfile(name="check", weights=self.weights, pooled=self.pooled)
        for layer, heads in self.pooled:
            if any(head >= self.query_heads for _, head, _ in heads):
                raise ValueError(f"layer {layer} ranks by heads {heads}, and the model has {self.query_heads}")
        for layer, v in self.weights:
            if len(v) != self.query_heads:
                raise ValueError(f"layer {layer} has {len(v)} weights, and the model {self.query_heads} query heads")
        if list(self.layers) != sorted(set(self.layers)) or not 1 <= self.layers[0] <= self.layers[-1] < self.depth - 1:
            raise ValueError(f"monitored layers must ascend between 1 and {self.depth - 2}, got {self.layers}")
        return self

    def check_shape(self, depth: int, query_heads: int, kv_heads: int) -> None:
        """Refuse a model of another shape.

        Raises:
            ProfileError: layers or heads differ.
        """
        mine, seen = (self.depth, self.query_heads, self.kv_heads), (depth, query_heads, kv_heads)
        if mine != seen:
            raise ProfileError(
                f"the profile of {self.model} is for {mine} layers, query heads and groups, and this model has {seen}; "
                "make one of its own with `entroprefill calibrate`"
            )

    @property
    def name(self) -> str:
        """Model and digest of what decides: what a record names the profile by."""
        said = self.model_dump(mode="json", include={"layers", "weights", "pooled", "mass_min", "mu_min"})
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.model}@{digest}"

    def head_profile(self, layers: tuple[int, ...], readable: tuple[int, ...]) -> HeadProfile:
        """Weights and ranking heads at these layers, as `PruningConfig.head_weights` takes them.

        Args:
            layers: monitored ones.
            readable: layers of this model and prompt whose rows see all chunks; a layer that ranks by heads of others
                is left to its own.
        """
        pooled = (one for one in self.pooled if one[0] in layers and all(head[0] in readable for head in one[1]))
        weights = (one for one in self.weights if one[0] in layers)
        return HeadProfile(name=self.name, weights=tuple(weights), pooled=tuple(pooled))

    def with_certificate(self, found: Certificate) -> ModelProfile:
        """The same with one more certificate; what decides, and so the name, stays as it is.

        Raises:
            ProfileError: the certificate was measured with another profile.
        """
        if found.profile != self.name:
            raise ProfileError(
                f"the certificate was measured with profile {found.profile or 'none'}, and this is {self.name}; "
                "certify again with --into this file"
            )
        return self.model_copy(update={"certificates": (*self.certificates, found)})

    def to_json(self) -> str:
        """As JSON, with a line for every entry."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> ModelProfile:
        """A profile from a file that ``entroprefill calibrate`` wrote.

        Raises:
            ProfileError: the file cannot be read, is no profile, or comes from another version.
        """
        try:
            return cls._parse(Path(path).read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(
                f"profile {str(path)!r} cannot be read: {error}; give a file that calibrate wrote"
            ) from error

    @classmethod
    def _parse(cls, text: str, name: str) -> ModelProfile:
        try:
            data: Any = json.loads(text)
            seen = data.get("version") if isinstance(data, dict) else None
            if seen is not None and seen != PROFILE_VERSION:
                raise ProfileError(
                    f"profile {name!r} is of version {seen!r}, and this is for version {PROFILE_VERSION!r}; make it "
                    "anew with `entroprefill calibrate`"
                )
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the whole"
            raise ProfileError(
                f"{name!r} is no profile: {place}: {first['msg']}; profiles come from `entroprefill calibrate`"
            ) from error
        except json.JSONDecodeError as error:
            raise ProfileError(
                f"{name!r} is no profile: not JSON ({error}); make one with `entroprefill calibrate`"
            ) from error


@lru_cache(maxsize=1)
def shipped() -> tuple[ModelProfile, ...]:
    """The profiles that come with the package."""
    folder = files("entroprefill_rag") / "profiles"
    if not folder.is_dir():
        return ()
    found = sorted((one for one in folder.iterdir() if one.name.endswith(".json")), key=lambda one: one.name)
    return tuple(ModelProfile._parse(one.read_text(encoding="utf-8"), one.name) for one in found)


def find(fingerprint: str) -> ModelProfile | None:
    """The shipped profile of a model with this fingerprint; None where there is none."""
    return next((one for one in shipped() if fingerprint in one.fingerprints), None)


def settle(config: PruningConfig, profile: ModelProfile | None, monitorable: tuple[int, ...]) -> PruningConfig:
    """A configuration in which nothing is left to a profile: as a run uses it and its record holds it.

    Where the profile weighs the heads, it also gives the monitored layers, if they are 'auto', and for these, since
    they were seen to find evidence, `mu_min` and `mass_min` where the caller left them at their defaults. Layers that
    the caller names keep the usual limits: one that looks at sinks only must not pass. It never touches a cap or the
    audit.

    Args:
        config: as the caller gave it.
        profile: the model's; None without one.
        monitorable: layers of this model and prompt that may be monitored.

    Raises:
        ProfileError: ``head_weights="profile"`` without a profile.
    """
    if config.head_weights not in ("auto", "profile"):
        return config
    if profile is None:
        if config.head_weights == "profile":
            raise ProfileError(
                "head_weights='profile' needs a profile of this model, and none has its fingerprint; make one with "
                "`entroprefill calibrate --model NAME --out FILE` and pass it as LocalBackend(profile=FILE), or use "
                "'auto'"
            )
        return config.model_copy(update={"head_weights": "renyi"})
    if config.layers != "auto":
        return config.model_copy(update={"head_weights": profile.head_profile(config.layers, monitorable)})
    layers = tuple(layer for layer in profile.layers if layer in monitorable)
    if not layers:  # all of them see too little of this prompt
        return config.model_copy(update={"head_weights": "renyi"})
    update: dict[str, Any] = {"head_weights": profile.head_profile(layers, monitorable), "layers": layers}
    update |= {name: getattr(profile, name) for name in ("mass_min", "mu_min") if name not in config.model_fields_set}
    return config.model_copy(update=update)
