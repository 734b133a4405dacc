"""What a caller gets back: the answer, and a record with the numbers behind every claim.

A record holds ids, numbers and hashes. Document, query and answer text go in only with ``include_text``.
Chunks are named by their position in the prompt (``prompt.chunks[i]``) inside trials, by id everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from entroprefill_rag.errors import RecordError

SCHEMA_VERSION = "1.0"  # of AuditRecord, which repeats it as a literal

Outcome = Literal["pruned", "bypassed", "off"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Reason(_Entry):
    """Why something happened: a stable code for programs, a sentence for people."""

    code: str
    message: str


class ModelInfo(_Entry):
    """The model whose attention was read."""

    name: str
    revision: str | None = None
    family: str = Field(description="`model_type` of the configuration.")
    dtype: str
    device: str
    kernel: str = Field(description="Attention implementation that ran, e.g. 'sdpa'.")
    layers: int
    query_heads: int = Field(description="H_Q.")
    kv_heads: int = Field(description="G, the number of GQA groups.")
    fingerprint: str = Field(description="Hash of configuration and tokenizer; says nothing of the weights.")


class ChunkInfo(_Entry):
    """One admitted chunk of the prompt."""

    id: str
    start: int = Field(description="First token.")
    end: int = Field(description="One past the last token.")
    protected: str | None = Field(default=None, description="Why it may not be removed, if so.")
    kept: bool = Field(default=True, description="Whether it was there above the accepted layer.")
    text: str | None = None
    title: str | None = None


class PromptInfo(_Entry):
    """The prompt, by hash and positions."""

    hash: str = Field(description="SHA-256 of the token ids.")
    tokens: int = Field(description="n.")
    chunks: tuple[ChunkInfo, ...]
    sink_tokens: int
    suffix: tuple[int, int] = Field(description="Half-open range of the query and the template's tail.")
    query_span: tuple[int, int] | None = Field(
        default=None, description="Half-open range of the query's own tokens, in the suffix; None where not known."
    )
    not_admitted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    query: str | None = None


class DualBound(_Entry):
    """Upper bound on the tokens any feasible removal could save (section 5)."""

    bound: float = Field(description="U(y, t).")
    gap: float = Field(description="U minus the tokens saved; not suboptimality where removal stopped by choice.")
    t: float = Field(description="Price of one more removed chunk.")
    k_max: int = Field(description="K: most chunks that may go.")
    prices: tuple[tuple[int, int, float], ...] = Field(description="Nonzero y as (head, proposal row, price).")
    cap_cost: float = Field(description="Sum of y * eps_row.")
    chunk_cost: tuple[float, ...] = Field(description="Per chunk, sum of y * m; used for removable chunks.")


class AuditResult(_Entry):
    """One observer distribution looked at one proposal."""

    observer: str = Field(description="Kind of the distribution [nu].")
    method: Literal["enumerate", "sample"]
    bound: str = Field(description="'exact' where enumerated, else the concentration bound.")
    m: int = Field(description="Observers looked at: the first of those announced, in the order drawn.")
    announced: int | None = Field(default=None, description="Sequential only: the most that would be drawn.")
    ended: Literal["passed", "hopeless", "exhausted"] | None = Field(
        default=None, description="Sequential only: why no more was drawn."
    )
    limit: float = Field(description="eps_audit.")
    level: float | None = Field(description="Confidence level spent per statement (delta'); None where exact.")
    eta_hat: tuple[float, ...] = Field(description="Mean discarded mass per head [H_Q].")
    upper: tuple[float, ...] = Field(description="Upper bound on the mean per head [H_Q]; `eta_hat` where exact.")
    passed: tuple[bool, ...] = Field(description="Per head [H_Q].")
    log_wealth: tuple[float, ...] | None = Field(
        default=None, description="Betting only: largest log wealth per head, against ln(1 / level)."
    )
    variance: tuple[float, ...] | None = Field(
        default=None, description="Empirical Bernstein only: unbiased variance per head [H_Q]."
    )
    retained_share: float | None = Field(
        default=None, description="Prompt rows only: probability that a row of the distribution is retained."
    )
    caps_imply: bool = Field(default=False, description="The row caps alone already imply this statement.")
    accepted: bool


class LayerTrial(_Entry):
    """What happened at one monitored layer."""

    layer: int
    doc_mass: float = Field(description="Mean mass of the proposal rows on chunk tokens outside the sinks.")
    eligible_heads: int
    fallback_groups: int = Field(description="GQA groups without an eligible head.")
    head_weights: tuple[float, ...] = Field(
        description="w per query head [H_Q]; sums to 1 within a group, to G over the layer where a profile weighs."
    )
    weighting: Literal["renyi", "uniform", "profile", "callable"] | None = Field(
        default=None, description="What weighed the heads; None where no head was weighed."
    )
    pooled_mass: tuple[float, ...] = Field(default=(), description="A_i per chunk.")
    evidence: tuple[float, ...] = Field(
        default=(),
        description="What the question's rows place on each chunk beyond the rows before the question, as a share of "
        "what they place on all chunks: mean over the profile's heads, of this and earlier layers. The scores come "
        "from it. Empty where they come from `pooled_mass`.",
    )
    scores: tuple[float, ...] = Field(default=(), description="S_i per chunk, low = removed first.")
    removed: tuple[int, ...] = Field(default=(), description="Positions of the chunks proposed for removal.")
    stopped: str | None = Field(default=None, description="Why removal stopped: 'target' or 'exhausted'.")
    solver: str | None = Field(default=None, description="What chose the set: 'greedy', 'exact', 'greedy (…)'.")
    tokens_saved: int = 0
    saved_share: float = Field(default=0.0, description="Of all chunk tokens.")
    row_max: tuple[tuple[float, ...], ...] = Field(
        default=(), description="Largest mass over proposal rows, [H_Q][k]; accepted or last trial only."
    )
    max_discarded: float | None = Field(default=None, description="Largest discarded mass of any head and row.")
    max_discarded_per_head: tuple[float, ...] = Field(default=(), description="[H_Q].")
    max_discarded_per_row: tuple[float, ...] = Field(default=(), description="Per proposal row, ascending [W_p].")
    cap_slack: float | None = Field(default=None, description="Smallest eps_row minus discarded mass.")
    pooled_discarded: float | None = Field(default=None, description="q(D).")
    envelope: float | None = Field(default=None, description="min(1, H_Q * W_p * q / zeta).")
    envelope_per_head: tuple[float, ...] = Field(default=(), description="min(1, G * W_p * q / w[h]), [H_Q].")
    streak: int = 0
    distance: float | None = Field(default=None, description="Jaccard distance to the previous layer's set.")
    audits: tuple[AuditResult, ...] = ()
    dual: DualBound | None = None
    verdict: Reason


class ObserverInfo(_Entry):
    """One observer distribution as used for this request."""

    kind: str
    support: int = Field(description="Number of rows, or probes, it may draw.")
    method: Literal["enumerate", "sample"]
    rows: tuple[int, ...] = Field(
        description="Positions to look at, in the order drawn. Of probes: places in the bank of `config`. A sequential "
        "audit looks at the first `m` of them."
    )
    weights: tuple[float, ...] | None = Field(default=None, description="Per row where not uniform.")
    decay: float | None = Field(default=None, description="Weighted rows only: weight relative to the next row.")
    delta: float | None = Field(default=None, description="Share of delta; None where enumerated.")


class AuditSetup(_Entry):
    """What was fixed before the request's attention was seen."""

    seed: int
    delta: float
    monitored_layers: int = Field(description="J.")
    query_heads: int = Field(description="H_Q.")
    m_a: int
    bound: str
    union: str
    sequential: bool = False
    attempts: Literal["each", "all"] = "each"
    attempt: int | None = Field(
        default=None,
        description="Which attempt at this prompt, as far as the backend's ledger goes back; it counts once its draws "
        "are read. None: no ledger, or nothing is drawn.",
    )
    observers: tuple[ObserverInfo, ...] = ()


class DecodeMonitor(_Entry):
    """What generated tokens' rows placed on the removed chunks, at the accepted layer: a measurement, no guarantee.

    Of a pruned answer that was given up (`restarted_full`), not of the full one that took its place.
    """

    layer: int
    threshold: float = Field(description="Mass above which a token counts as drifted.")
    on_drift: Literal["record", "stop", "restart_full"]
    tokens: int = Field(description="Generated tokens whose rows were read; the last one generated has none.")
    max_per_token: tuple[float, ...] = Field(
        default=(),
        description="Largest over heads, per token read; four significant digits, more at the threshold. 1 where the "
        "row is no number.",
    )
    mean: float = Field(default=0.0, description="Over tokens and heads.")
    first_above: int | None = Field(default=None, description="Index of the first token above the threshold.")
    action: Literal["none", "stopped", "restarted_full"] = Field(
        default="none",
        description="What was done at that token. 'stopped': the token chosen from its row is the answer's last.",
    )


class Claims(_Entry):
    """What this record says, in the words of section 10, and what it does not say."""

    exact: str | None = None
    probabilistic: str | None = None
    conditional: str | None = None
    not_claimed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class AuditRecord(_Entry):
    """What one run claims, and the numbers behind it; with model and prompt at hand, enough to repeat the run."""

    schema_version: Literal["1.0"] = "1.0"
    created: str = Field(description="UTC, ISO 8601.")
    versions: dict[str, str]
    model: ModelInfo
    prompt: PromptInfo
    config: dict[str, Any] = Field(description="The PruningConfig as given, as JSON data.")
    layers: tuple[int, ...] = Field(default=(), description="Monitored layers [M].")
    proposal_rows: tuple[int, ...] = Field(default=(), description="Positions of the proposal rows.")
    audit: AuditSetup | None = None
    replay: bool = Field(
        default=False, description="The audit's draws were seen before, with this configuration: no new attempt."
    )
    trials: tuple[LayerTrial, ...] = ()
    outcome: Outcome
    accepted_layer: int | None = None
    reason: Reason
    tokens_removed: int = 0
    decode: DecodeMonitor | None = Field(default=None, description="None where nothing was pruned, decoded or watched.")
    claims: Claims = Field(default_factory=Claims)
    answer: str | None = None

    @property
    def trial(self) -> LayerTrial | None:
        """The accepted trial, else the last one."""
        for trial in self.trials:
            if trial.layer == self.accepted_layer:
                return trial
        return self.trials[-1] if self.trials else None

    @property
    def retained_ids(self) -> tuple[str, ...]:
        """Ids of the chunks above the accepted layer, in prompt order."""
        return tuple(chunk.id for chunk in self.prompt.chunks if chunk.kept)

    @property
    def dropped_ids(self) -> tuple[str, ...]:
        """Ids of the removed chunks, in prompt order."""
        return tuple(chunk.id for chunk in self.prompt.chunks if not chunk.kept)

    @property
    def protected_ids(self) -> tuple[str, ...]:
        """Ids of the protected chunks, in prompt order."""
        return tuple(chunk.id for chunk in self.prompt.chunks if chunk.protected)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON data."""
        return self.model_dump(mode="json")

    def to_json(self, indent: int | None = None) -> str:
        """The record as JSON text."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> AuditRecord:
        """Read a record back.

        Raises:
            RecordError: the text is no record of this schema.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the top level"
            raise RecordError(
                f"not a record of schema {SCHEMA_VERSION}: {first['msg']} at {place}; "
                "records come from `GenerationResult.audit.to_json()` or `entroprefill ask --record FILE`"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> AuditRecord:
        """Read a record from a file (see :meth:`from_json`)."""
        return cls.from_json(Path(path).read_bytes())

    def _repr_html_(self) -> str:
        """What a notebook shows: the outcome, what was dropped, and each bound beside its limit."""
        return _table(f"EntroPrefill record: {self.outcome}", self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("reason", self.reason.message)]
        if self.outcome == "pruned":
            rows.append(("dropped", ", ".join(self.dropped_ids)))
            rows.append(
                ("layer", f"{self.accepted_layer} of {self.model.layers}, {self.tokens_removed} tokens removed")
            )
        trial = self.trial
        if trial is not None and trial.max_discarded is not None:
            slack = "" if trial.cap_slack is None else f", {trial.cap_slack:.3f} below its cap"
            rows.append(("worst row", f"{trial.max_discarded:.3f}{slack} (layer {trial.layer})"))
        for audit in trial.audits if trial is not None else ():
            kind = "exact mean" if audit.method == "enumerate" else f"{audit.bound} bound, {audit.m} draws"
            verdict = "pass" if audit.accepted else "fail"
            bound = f"{max(audit.upper, default=0.0):.3f}, limit {audit.limit:g}"
            rows.append((f"audit {audit.observer}", f"worst head {bound} ({kind}): {verdict}"))
        return [*rows, *(("note", warning) for warning in self.claims.warnings)]

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        layer = f" at layer {self.accepted_layer}" if self.accepted_layer is not None else ""
        return (
            f"AuditRecord({self.outcome}{layer}: kept {len(self.retained_ids)} of {len(self.prompt.chunks)} chunks, "
            f"{self.tokens_removed} tokens removed; {self.reason.code})"
        )


class Usage(_Entry):
    """Token counts."""

    prompt_tokens: int
    kept_tokens: int = Field(description="Prompt tokens above the accepted layer; all of them where none was.")
    generated_tokens: int = Field(description="Of the answer.")
    given_up_tokens: int = Field(
        default=0, description="Generated besides, by a pruned run whose answer was given up (`on_drift`)."
    )


class Timings(_Entry):
    """Wall-clock seconds of the parts of one run."""

    layout: float = 0.0
    shallow: float = Field(default=0.0, description="Prefill up to the decision, less the rule.")
    rule: float = Field(default=0.0, description="Reading rows, proposing, auditing.")
    deep: float = Field(default=0.0, description="Prefill after the decision.")
    decode: float = 0.0
    wait: float = Field(default=0.0, description="Waiting for another request's prefill.")
    given_up: float = Field(
        default=0.0,
        description="A pruned run whose answer was given up (`on_drift`), from its prefill to its last token: "
        "`shallow`, `rule`, `deep` and `decode` are then those of the full run.",
    )

    @property
    def first_token(self) -> float:
        """Seconds from the call to the first token of the answer."""
        return self.layout + self.wait + self.given_up + self.shallow + self.rule + self.deep


class PruneResult(_Entry):
    """The outcome of pruning, known before the first token."""

    retained_ids: tuple[str, ...]
    dropped_ids: tuple[str, ...]
    protected_ids: tuple[str, ...]
    timings: Timings
    audit: AuditRecord

    @property
    def pruned(self) -> bool:
        """Whether anything was removed."""
        return self.audit.outcome == "pruned"


class GenerationResult(_Entry):
    """An answer, and what was done to get it."""

    answer: str
    retained_ids: tuple[str, ...]
    dropped_ids: tuple[str, ...]
    protected_ids: tuple[str, ...]
    finish_reason: Literal["stop", "length", "cancelled", "drift"]
    usage: Usage
    timings: Timings
    audit: AuditRecord

    @property
    def pruned(self) -> bool:
        """Whether anything was removed."""
        return self.audit.outcome == "pruned"

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer, then the record in short."""
        tokens = f"{self.usage.kept_tokens} of {self.usage.prompt_tokens} kept, {self.usage.generated_tokens} generated"
        rows = [("answer", self.answer), ("tokens", tokens), ("first token", f"{self.timings.first_token:.2f} s")]
        return _table(f"EntroPrefill answer: {self.audit.outcome}", [*rows, *self.audit._rows()])

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        answer = self.answer if len(self.answer) <= 60 else self.answer[:57] + "..."
        return f"GenerationResult({answer!r}, kept {self.usage.kept_tokens} of {self.usage.prompt_tokens} tokens)"


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A fragment of HTML without script; ids, answers and messages are strangers' text, escaped and isolated."""
    cells = "".join(
        f'<tr><th scope="row" style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left;white-space:pre-wrap"><bdi>{escape(text)}</bdi></td></tr>'
        for name, text in rows
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{cells}</tbody></table>"
