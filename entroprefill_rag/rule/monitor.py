"""Layer by layer: propose, reach the saving, agree with earlier layers, pass the audit (section 6).

The order of events is part of the guarantee. Everything of the audit is fixed when the monitor is made. At a layer the
proposal rows are read first; what the audit's rows show is read only once the removed set is fixed, and decides nothing
but whether this layer is used.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.record import AuditResult, AuditSetup, LayerTrial, Reason
from entroprefill_rag.rule.audit import Audit, plan_audit, significant
from entroprefill_rag.rule.dual import dual_bound
from entroprefill_rag.rule.losses import LayerLosses, RowReader
from entroprefill_rag.rule.proposal import PROPOSED, Proposal, Proposer

VERDICTS = {
    # of a layer
    "accepted": "The proposal passed every audit; deeper layers run without the removed chunks.",
    "not_finite": "The attention rows hold values that are no numbers.",
    "no_document_mass": "The layer looks at the documents too little for its choice to mean anything.",
    "no_eligible_heads": "No head places enough attention on the region where heads are judged.",
    "caps_leave_nothing": "No removable chunk fits under the row caps and the largest saving.",
    "below_min_saving": "What the caps let go is less than the least saving.",
    "streak": "Not enough consecutive layers have agreed on the set yet.",
    "ledger_failed": "The reuse ledger could not note that draws would be read, so they were not.",
    "audit_failed": "An audit did not show a small enough mean discarded mass for every head.",
    # of a request, before any attention is read
    "no_monitored_layer": "No layer is monitored.",
    "no_chunks": "The prompt holds no chunk.",
    "nothing_removable": "Every chunk is protected.",
    "too_few_chunks": "At least `m0` chunks must stay, and there are no more than that.",
    "saving_out_of_reach": "Even without caps the removable chunks do not amount to the least saving.",
    "audit_support": "An observer distribution holds a single row: a look at one token is no audit.",
    # of a request whose audit asks for probe queries
    "probe_kernel": "Probes need an attention kernel that takes a mask.",
    "probe_length": "A probe does not fit the model's positions.",
    "probe_outputs": "Hidden states or attentions were asked for, and a probe's would be among them.",
    "probe_padding": "The prompt holds padding, and probes are laid out without.",
    "probe_template": "With another question, the prompt begins with other tokens.",
    # of a request, when all is over
    "no_layer_accepted": "Every monitored layer was rejected; the trials say why.",
    "not_observed": "The run ended before a monitored layer was reached.",
}
"""Codes of reasons, with what each says; codes are stable."""


@dataclass(frozen=True)
class Decision:
    """What a layer decided.

    Attributes:
        accepted: whether deeper layers run on the retained tokens only.
        removed: positions of the removed chunks; empty unless accepted.
        kept_tokens: LongTensor, ascending positions of the retained tokens; all of them unless accepted.
    """

    accepted: bool
    removed: tuple[int, ...]
    kept_tokens: Tensor


def jaccard_distance(one: Iterable[int], other: Iterable[int]) -> float:
    """``1 - |D n D'| / |D u D'|``; 0 for two empty sets."""
    a, b = set(one), set(other)
    return 1.0 - len(a & b) / len(a | b) if a | b else 0.0


class Monitor:
    """Decides for one request at which layer, if any, which chunks go.

    Args:
        config: what may be removed and under which limits.
        layout: the prompt.
        layers: layers that may be audited [M], ascending; their number is part of the guarantee.
        query_heads: ``H_Q``.
        kv_heads: ``G``.
        seed: of the audit's draws; None takes the configuration's, else fresh randomness of the operating system.

    Attributes:
        layers: the monitored layers; empty where the request cannot be pruned (see `bypass`).
        evidence_layers: layers whose rows rank chunks at a monitored one; those that are not monitored go to
            :meth:`note`.
        proposal_rows: LongTensor, positions of the proposal rows.
        seed: of the audit's draws.
        bypass: why nothing is monitored, known before any attention is read; None where something is.
        trials: what happened at the layers observed so far.
        before_audit: called before what the audit's rows show is read; a reason it returns stands in for the audit.

    Raises:
        ConfigError: the audit can never pass (names the smallest ``m_a``), heads do not divide into groups, or layers
            do not ascend.
    """

    def __init__(
        self,
        config: PruningConfig,
        layout: PromptLayout,
        layers: tuple[int, ...],
        query_heads: int,
        kv_heads: int,
        *,
        seed: int | None = None,
    ) -> None:
        if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
            raise ConfigError(f"{query_heads} query heads do not divide into {kv_heads} groups of equal size")
        if list(layers) != sorted(set(layers)):
            raise ConfigError(f"monitored layers must ascend without repeats, got {layers}")
        self._config, self._layout, self._heads = config, layout, query_heads
        given = config.audit.seed if seed is None else seed
        # 53 bits: every reader of JSON keeps the number exact.
        self.seed = secrets.randbits(53) if given is None else given
        self._proposer = Proposer(config, layout, kv_heads)
        self.proposal_rows = self._proposer.rows
        self.trials: list[LayerTrial] = []
        self._last: Proposal | None = None
        self._streak, self._agreed = 0, tuple[int, ...]()
        self._audit: Audit | None = None
        self.before_audit: Callable[[], Reason | None] | None = None
        self.bypass = self._proposer.why_not()
        if not layers:
            self.bypass = Reason(code="no_monitored_layer", message="No layer is monitored.")
        if self.bypass is None:
            self.bypass = self._plan(len(layers))
        self.layers = layers if self.bypass is None else ()
        self.evidence_layers = self._proposer.evidence_layers(self.layers)

    def _plan(self, layers: int) -> Reason | None:
        """Fix the audit; says why where this prompt cannot be audited."""
        spans = self._layout.chunk_spans
        self._audit = plan_audit(
            self._config.audit,
            document_block=(spans[0][0], spans[-1][1]),
            suffix=self._layout.suffix_span,
            layers=layers,
            heads=self._heads,
            seed=self.seed,
            prompt_hash=self._layout.hash,
        )
        narrow = [plan.kind for plan in self._audit.plans if plan.support < 2]
        if not narrow:
            return None
        message = f"The distribution {narrow[0]!r} holds one row of this prompt: a look at one token is no audit."
        return Reason(code="audit_support", message=message)

    def observe(self, layer: int, read: RowReader) -> Decision:
        """Decide at one layer.

        Args:
            layer: its index; layers are observed in ascending order, each once, none after one was accepted.
            read: reads rows of this layer. It is called with the rows that rank the chunks, where this is one of
                `evidence_layers`; with the proposal rows; and, only where a proposal has reached its saving and its
                streak, with the audit's rows, in batches where the audit is sequential. Where probes are observers it
                is a :class:`.losses.ReadsProbes` too.

        Raises:
            ConfigError: the layer is not monitored, or its turn is over: the audit's union bound counts neither.
        """
        done = self.trials[-1] if self.trials else None
        if layer not in self.layers or (done is not None and (done.layer >= layer or done.verdict.code == "accepted")):
            raise ConfigError(
                f"layer {layer} may not be observed: monitored are {self.layers}, in order and each once, until one is "
                f"accepted; observed so far: {tuple(trial.layer for trial in self.trials)}"
            )
        if layer in self.evidence_layers:
            self._proposer.note(layer, read)
        self._last = self._proposer.propose(layer, read(self.proposal_rows, True))
        trial = self._last.trial
        if trial.verdict.code == PROPOSED:
            trial = self._scheduled(trial)
        if trial.verdict.code == PROPOSED and self.before_audit and (prevented := self.before_audit()):
            trial = trial.model_copy(update={"verdict": prevented})
        if trial.verdict.code == PROPOSED:
            trial = self._audited(trial, read)
        if trial.verdict.code not in ("accepted", "streak"):
            self._streak, self._agreed = 0, ()
        self.trials.append(trial)
        kept = torch.ones(self._layout.n_tokens, dtype=torch.bool, device="cpu")
        if trial.verdict.code != "accepted":
            return Decision(False, (), kept.nonzero().flatten())
        kept[torch.from_numpy(self._removed_tokens(trial))] = False
        return Decision(True, trial.removed, kept.nonzero().flatten())

    def note(self, layer: int, read: RowReader) -> None:
        """Read a layer that is not monitored, for the order of removal at later ones.

        The audit is none the wiser: its draws stay unread, and the set may depend on any row but through them.

        Args:
            layer: its index, one of `evidence_layers`.
            read: reads rows of this layer.
        """
        self._proposer.note(layer, read)

    def _scheduled(self, trial: LayerTrial) -> LayerTrial:
        """Count consecutive layers that agree on the set."""
        distance = jaccard_distance(self._agreed, trial.removed) if self._streak else None
        agrees = distance is not None and distance <= self._config.theta
        self._streak, self._agreed = (self._streak + 1 if agrees else 1), trial.removed
        update: dict[str, object] = {"streak": self._streak, "distance": distance}
        if self._streak < self._config.streak:
            message = f"{self._streak} of {self._config.streak} consecutive layers agree on the set."
            update["verdict"] = Reason(code="streak", message=message)
        return trial.model_copy(update=update)

    def _audited(self, trial: LayerTrial, read: RowReader) -> LayerTrial:
        """Read what the audit looks at, now that the set is fixed, and judge."""
        audit, last = self._audit, self._last
        if audit is None or last is None:
            raise ConfigError("there is no audit to pass: this request is bypassed")
        losses = LayerLosses(
            audit,
            read,
            trial.removed,
            self._removed_tokens(trial),
            known=self.proposal_rows.numpy(),
            lost=last.masses[..., list(trial.removed)].sum(axis=-1),
            caps=self._proposer.caps,
        )
        found = self._examined(audit, losses, trial.tokens_saved)
        if not losses.finite:
            message = f"Layer {trial.layer}: the audit's attention rows hold NaN or infinity."
            return trial.model_copy(update={"verdict": Reason(code="not_finite", message=message)})
        audits = tuple(found[plan.kind] for plan in audit.plans if plan.kind in found)
        return trial.model_copy(update={"audits": audits, "verdict": _verdict(trial, audits)})

    @staticmethod
    def _examined(audit: Audit, losses: LayerLosses, removed: int) -> dict[str, AuditResult]:
        """One result per distribution, by kind; once one has failed, what would cost more is left out."""
        sequential = audit.settings.sequential
        if not sequential:
            losses.read_rows()
        found: dict[str, AuditResult] = {}
        for plan in audit.in_turn:
            failed = any(not result.accepted for result in found.values())
            if not losses.finite or (failed and (sequential or plan.probes)):
                break
            if sequential and plan.method == "sample":
                result = audit.follow(plan, partial(losses.of, plan), tokens_removed=removed)
            else:
                result = audit.decide(plan, losses.of(plan), tokens_removed=removed, allowed=losses.allowed(plan))
            found[plan.kind] = result
        return found

    def _removed_tokens(self, trial: LayerTrial) -> NDArray[np.int64]:
        spans = self._layout.chunk_spans
        return np.concatenate([np.arange(*spans[i], dtype=np.int64) for i in trial.removed])

    @property
    def draws(self) -> bool:
        """Whether the audit would look at draws; False where all is enumerated, or nothing is audited."""
        plans = self._audit.plans if self._audit is not None and self.bypass is None else ()
        return any(plan.method == "sample" for plan in plans)

    @property
    def probes(self) -> tuple[int, ...]:
        """Places in the bank of probes that the audit may look at, ascending; none where no probe is asked for."""
        return () if self._audit is None or self.bypass is not None else tuple(self._audit.probes.tolist())

    def setup(self) -> AuditSetup | None:
        """What was fixed before any attention was seen; None where the request is bypassed without an audit."""
        return None if self._audit is None else self._audit.setup()

    def reason(self) -> Reason:
        """Why the request was pruned, or was not."""
        if self.bypass is not None:
            return self.bypass
        if not self.trials:
            return Reason(code="not_observed", message=VERDICTS["not_observed"])
        if self.trials[-1].verdict.code == "accepted":
            return self.trials[-1].verdict
        layers: dict[str, list[str]] = defaultdict(list)
        for trial in self.trials:
            layers[trial.verdict.code].append(str(trial.layer))
        why = "; ".join(f"{code} at {', '.join(where)}" for code, where in layers.items())
        message = f"None of the {len(self.trials)} layers observed was accepted: {why}."
        return Reason(code="no_layer_accepted", message=message)

    def finish(self) -> tuple[LayerTrial, ...]:
        """All trials, the last of them (the accepted one, if any is) with its row maxima and its dual bound.

        The bound costs a linear programme: call this after the first token. ``dual_bound="never"`` leaves it out.
        """
        if self.trials and self._last is not None and not self.trials[-1].row_max:
            trial, problem = self.trials[-1], self._last.problem
            update: dict[str, object] = {"row_max": tuple(significant(row) for row in self._last.masses.max(axis=1))}
            if problem is not None and self._config.dual_bound == "lazy":
                update["dual"] = dual_bound(problem, trial.tokens_saved, seconds=self._config.solver_seconds)
            self.trials[-1] = trial.model_copy(update=update)
        return tuple(self.trials)


def accepted_message(trial: LayerTrial) -> str:
    """What an accepted layer does, in words."""
    many = "" if len(trial.removed) == 1 else "s"
    return f"Layer {trial.layer} removes {len(trial.removed)} chunk{many}, {trial.saved_share:.1%} of the chunk tokens."


def _verdict(trial: LayerTrial, audits: tuple[AuditResult, ...]) -> Reason:
    if all(audit.accepted for audit in audits):
        return Reason(code="accepted", message=accepted_message(trial))
    failed = next(audit for audit in audits if not audit.accepted)
    message = (
        f"Audit {failed.observer!r}: {failed.passed.count(False)} of {len(failed.passed)} heads do not show a mean "
        f"discarded mass of at most {failed.limit:g}; the largest upper bound is {max(failed.upper):.4f}."
    )
    return Reason(code="audit_failed", message=message)
