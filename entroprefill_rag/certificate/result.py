"""The certificate: what was fixed beforehand, what was measured, what may be said. JSON in, JSON out.

Imports pydantic, the configuration and errors only, so that a model's profile can hold certificates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import CertificateError

CERTIFICATE_VERSION = "1"

LossName = Literal["answer_changed", "gold_lost", "discarded_mass"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measurement(_Entry):
    """What one configuration showed on all requests."""

    mean_loss: float = Field(ge=0.0, le=1.0, description="R, over all requests; bypassed ones count with loss 0.")
    total_loss: float = Field(ge=0.0, description="n R, summed without rounding in between; the p-value comes from it.")
    p_value: float = Field(ge=0.0, le=1.0, description="Hoeffding-Bentkus, of an expected loss of alpha or more.")
    pruned: int = Field(ge=0, description="Requests from which something was removed.")
    saved_work: float = Field(
        ge=0.0, le=1.0, description="Share of tokens x layers of a full prefill not run, summed over all requests."
    )


class Tested(_Entry):
    """One place of the grid."""

    changes: dict[str, Any] = Field(description="What is set on top of `base`.")
    measured: Measurement | None = Field(
        default=None, description="None after the first that was not rejected: what comes later cannot be certified."
    )
    certified: bool = False


class Workload(_Entry):
    """The requests, by number and digest; none of their text."""

    n: int = Field(ge=1, description="Requests that were measured.")
    digest: str = Field(description="SHA-256 of the requests, in their order.")
    left_out: dict[str, int] = Field(
        default_factory=dict,
        description="Requests that were read and not measured, by reason; the reasons do not depend on the grid. The "
        "claim is about requests to which no such reason applies.",
    )


class Claim(_Entry):
    """The certificate in words."""

    probabilistic: str | None = None
    assumes: tuple[str, ...] = ()
    not_claimed: tuple[str, ...] = ()


class Certificate(_Entry):
    """Which configurations have, for this model and workload, an expected loss below alpha, and the fastest of them."""

    version: Literal["1"] = "1"
    created: str = Field(description="UTC, ISO 8601.")
    versions: dict[str, str] = Field(default_factory=dict)
    model: str
    fingerprint: str = Field(description="Of configuration and tokenizer; says nothing of the weights.")
    dtype: str
    profile: str | None = Field(description="Name of the profile that weighed the heads; None without one.")
    loss: LossName
    alpha: float = Field(gt=0.0, lt=1.0)
    delta: float = Field(gt=0.0, lt=1.0)
    test: Literal["fixed_sequence"] = "fixed_sequence"
    p_value: Literal["hoeffding_bentkus"] = "hoeffding_bentkus"
    max_new_tokens: int | None = Field(default=None, description="Longest answer compared; `answer_changed` only.")
    seed: int | None = Field(default=None, description="Of the audits' draws while measuring; None: fresh ones.")
    requests: Workload
    base: dict[str, Any] = Field(description="What all configurations share: the settings that were not defaults.")
    grid: tuple[Tested, ...] = Field(min_length=1, description="In the order tested, safest first; fixed beforehand.")
    certified: int = Field(ge=0, description="How many, counted from the first.")
    chosen: int | None = Field(description="Of the certified ones the one that saved most work; the first of equals.")
    config: dict[str, Any] | None = Field(description="The chosen configuration, for PruningConfig and `ask --config`.")
    claim: Claim

    @model_validator(mode="after")
    def _fits_itself(self) -> Certificate:
        ps = [one.measured.p_value if one.measured is not None else 1.0 for one in self.grid]
        passed = next((at for at, p in enumerate(ps) if p > self.delta), len(ps))
        if self.certified != passed or any(one.certified != (at < passed) for at, one in enumerate(self.grid)):
            raise ValueError(
                f"{self.certified} configurations are called certified, and by their p-values it is the first {passed}"
            )
        saved = [one.measured.saved_work for one in self.grid[:passed] if one.measured is not None]
        if self.chosen != (saved.index(max(saved)) if saved else None):
            raise ValueError(f"configuration {self.chosen} is chosen, and is not the certified one that saves most")
        if (self.config is None) != (self.chosen is None):
            raise ValueError("a certificate holds a configuration where one is chosen, and only there")
        return self

    def pruning_config(self) -> PruningConfig | None:
        """The chosen configuration; None where nothing is certified."""
        return None if self.config is None else PruningConfig.model_validate(self.config)

    def to_json(self) -> str:
        """As JSON, with a line for every entry."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> Certificate:
        """A certificate from a file that ``entroprefill certify --out`` wrote.

        Raises:
            CertificateError: the file cannot be read or is no certificate.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise CertificateError(f"certificate {str(path)!r} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the whole"
            raise CertificateError(
                f"{str(path)!r} is no certificate of version {CERTIFICATE_VERSION}: {place}: {first['msg']}; "
                "certificates come from `entroprefill certify --out FILE`"
            ) from error
