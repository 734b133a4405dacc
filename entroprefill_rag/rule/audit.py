"""The audit of a proposal (section 6): how many observers it takes, what they lose, whether every head passes.

Everything but the losses is fixed before the request's attention is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from entroprefill_rag.config import AuditConfig
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.record import AuditResult, AuditSetup, ObserverInfo
from entroprefill_rag.rule.bounds import Bounded, bounded_mean, exact_mean, smallest_m, statements
from entroprefill_rag.rule.observers import AuditPlan, plan_audits, retained_share
from entroprefill_rag.rule.sequential import Sequential, batch_slices, sequential_mean

Floats = NDArray[np.float64]

AUTO_LEAST = 64
AUTO_MOST = 4096
AUTO_TIMES = 2
AUTO_TIMES_SEQUENTIAL = 4


def significant(values: Iterable[float] | Floats) -> tuple[float, ...]:
    """Numbers at nine significant digits: a third of the bytes in a record, recomputable to 1e-8."""
    return tuple(float(f"{value:.9g}") for value in values)


def observers_needed(settings: AuditConfig, *, layers: int, heads: int, sampled: int = 1) -> int:
    """The number ``m_a`` of observers drawn per sampled distribution; knows no prompt.

    ``"auto"`` takes twice the smallest number that could pass at all, at least 64 and at most 4096: at the smallest
    itself only a loss of exactly 0 passes. A sequential audit announces four times that number, since it stops at what
    it needs: simulated with betas at a mean of ``eps / 2`` (9 heads, 8 layers), the power rises from 0.2 to 0.8 at
    twice to 0.99, for 1.1 to 1.5 times the looks; a clear case costs what it cost. More would cost mostly where the
    audit fails in the end: a head just above ``eps`` is given up after some 85% of what was announced.

    Args:
        settings: the audit.
        layers: ``J``, layers that may be audited.
        heads: ``H_Q``.
        sampled: distributions that share ``delta``.

    Raises:
        ConfigError: no layer could ever pass with this number; names the smallest that could.
    """
    level = settings.delta / sampled / statements(settings.union, layers, heads)
    least = smallest_m(settings.bound, settings.eps_audit, level)
    limit = AUTO_MOST if settings.m_a == "auto" else settings.m_a
    if least > limit:
        raise ConfigError(
            f"the audit can never pass: even if no observer loses anything, the {settings.bound} bound needs "
            f"m_a >= {least} observers to show a mean of at most eps_audit={settings.eps_audit} at delta="
            f"{settings.delta} over {layers} layers and {heads} heads, but m_a is "
            f"{f'limited to {limit} by auto' if settings.m_a == 'auto' else limit}; set m_a={least} or more, raise "
            "eps_audit or delta, monitor fewer layers, or use bound='betting', union='layers' or method='enumerate'"
        )
    times = AUTO_TIMES_SEQUENTIAL if settings.sequential else AUTO_TIMES
    return min(limit, max(AUTO_LEAST, times * least)) if settings.m_a == "auto" else limit


@dataclass(frozen=True)
class Audit:
    """What one request's audits look at.

    Attributes:
        settings: the configuration it was planned from.
        plans: one per observer distribution; all must pass.
        seed: of the draws.
        layers: ``J``.
        heads: ``H_Q``.
        m_a: observers per sampled distribution; where the audit is sequential, the most of them.
        looked: ``[U]`` distinct positions of the prompt that any plan may look at, ascending.
        probes: ``[B]`` distinct places in the bank of probes that any plan may look at, ascending.
    """

    settings: AuditConfig
    plans: tuple[AuditPlan, ...]
    seed: int
    layers: int
    heads: int
    m_a: int
    looked: NDArray[np.int64]
    probes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def in_turn(self) -> tuple[AuditPlan, ...]:
        """The plans from the cheapest to look at to the dearest: rows before probes, enumerated before sampled."""
        return tuple(sorted(self.plans, key=lambda plan: (plan.probes, plan.method == "sample")))

    def level(self, plan: AuditPlan) -> float | None:
        """Confidence level per statement of a plan; None where it is exact."""
        if plan.delta is None:
            return None
        return plan.delta / statements(self.settings.union, self.layers, self.heads)

    def losses(self, plan: AuditPlan, lost: Floats) -> Floats:
        """Losses of a plan's rows ``[H_Q, m]``, in the order drawn, from those at ``looked`` ``[H_Q, U]``."""
        return np.asarray(lost[:, np.searchsorted(self.looked, plan.rows.numpy())])

    def judge(self, plan: AuditPlan, lost: Floats, *, tokens_removed: int, allowed: Floats) -> AuditResult:
        """Whether every head's mean discarded mass is shown to be at most ``eps_audit``, by all rows of a plan.

        Args:
            plan: one audit, of rows.
            lost: ``[H_Q, U]`` discarded mass at the positions ``looked``, 0 at rows that are themselves removed.
            tokens_removed: by the proposal.
            allowed: ``[U]`` the most that the caps let a row lose: its cap, 0 for a removed row, else 1.
        """
        at = self.losses(plan, allowed[None])
        return self.decide(plan, self.losses(plan, lost), tokens_removed=tokens_removed, allowed=at)

    def decide(self, plan: AuditPlan, losses: Floats, *, tokens_removed: int, allowed: Floats) -> AuditResult:
        """Whether every head's mean loss is shown to be at most ``eps_audit``, by all observers of a plan.

        Args:
            plan: one audit.
            losses: ``[H_Q, m]`` of its observers, in the order drawn.
            tokens_removed: by the proposal.
            allowed: ``[1, m]`` the most that the caps let each observer lose.
        """
        limit, level = self.settings.eps_audit, self.level(plan)
        if level is not None:
            return self._result(plan, bounded_mean(losses, limit, level, self.settings.bound), plan.m, tokens_removed)
        weights = None if plan.weights is None else plan.weights.numpy()
        result = exact_mean(losses, weights, limit)
        # Draws are not the support: only an enumerated one can be shown to be covered by the caps.
        implied = bool(exact_mean(allowed, weights, limit).passed.all())
        return self._result(plan, result, plan.m, tokens_removed, caps_imply=implied)

    def follow(self, plan: AuditPlan, look: Callable[[slice], Floats], *, tokens_removed: int) -> AuditResult:
        """The same, looking at the draws in batches and at none after the outcome is certain.

        The draws are those announced, in their order; only how many of them are looked at depends on what they show,
        which betting wealth allows (:mod:`.sequential`). Nothing can pass before the first batch ends.

        Args:
            plan: one sampled audit.
            look: losses ``[H_Q, b]`` of the observers at a slice of the draws; called with ascending slices that touch.
            tokens_removed: by the proposal.

        Raises:
            ConfigError: the plan is enumerated.
        """
        limit, level = self.settings.eps_audit, self.level(plan)
        if level is None:
            raise ConfigError(f"{plan.kind!r} is enumerated: an exact mean needs all of its support")
        slices = batch_slices(plan.m, smallest_m(self.settings.bound, limit, level))
        seen = sequential_mean((look(part) for part in slices), eps=limit, level=level, draws=plan.m)
        return self._result(plan, seen.bounded, seen.drawn, tokens_removed, sequential=seen)

    def _result(
        self,
        plan: AuditPlan,
        result: Bounded,
        m: int,
        tokens_removed: int,
        *,
        caps_imply: bool = False,
        sequential: Sequential | None = None,
    ) -> AuditResult:
        level = self.level(plan)
        return AuditResult(
            observer=plan.kind,
            method=plan.method,
            bound="exact" if level is None else self.settings.bound,
            m=m,
            announced=None if sequential is None else plan.m,
            ended=None if sequential is None else sequential.stopped,
            limit=self.settings.eps_audit,
            level=level,
            eta_hat=significant(result.eta_hat),
            upper=significant(result.upper),
            passed=tuple(result.passed.tolist()),
            log_wealth=None if result.log_wealth is None else significant(result.log_wealth),
            variance=None if result.variance is None else significant(result.variance),
            retained_share=retained_share(plan, tokens_removed),
            caps_imply=caps_imply,
            accepted=bool(result.passed.all()),
        )

    def setup(self) -> AuditSetup:
        """The part of the record that says what was fixed beforehand."""
        return AuditSetup(
            seed=self.seed,
            delta=self.settings.delta,
            monitored_layers=self.layers,
            query_heads=self.heads,
            m_a=self.m_a,
            bound=self.settings.bound,
            union=self.settings.union,
            sequential=self.settings.sequential,
            attempts=self.settings.attempts,
            observers=tuple(
                ObserverInfo(
                    kind=plan.kind,
                    support=plan.support,
                    method=plan.method,
                    rows=tuple(plan.rows.tolist()),
                    weights=None if plan.weights is None else significant(plan.weights.tolist()),
                    decay=plan.decay,
                    delta=plan.delta,
                )
                for plan in self.plans
            ),
        )


def plan_audit(
    settings: AuditConfig,
    *,
    document_block: tuple[int, int],
    suffix: tuple[int, int],
    layers: int,
    heads: int,
    seed: int,
    prompt_hash: str,
) -> Audit:
    """Fix the audit of one request.

    How many distributions are sampled depends on ``m_a``, which depends on how many share ``delta``: the smallest
    consistent answer is taken.

    Args:
        settings: the audit.
        document_block: half-open range from the first chunk's start to the last chunk's end.
        suffix: half-open range of the query and the template's tail.
        layers: ``J``.
        heads: ``H_Q``.
        seed: of the draws.
        prompt_hash: names the prompt.

    Raises:
        ConfigError: a sampled audit that could never pass; names the smallest ``m_a`` that could.
    """

    def plans(m_a: int) -> tuple[AuditPlan, ...]:
        return plan_audits(
            settings.observers,
            document_block=document_block,
            suffix=suffix,
            m_a=m_a,
            delta=settings.delta,
            method=settings.method,
            seed=seed,
            prompt_hash=prompt_hash,
        )

    # Sharing by one is asked for even where this prompt is enumerated: a configuration that fails on the next longer
    # prompt should fail at once.
    sharing, m_a = 1, AUTO_LEAST
    while settings.method != "enumerate":
        m_a = observers_needed(settings, layers=layers, heads=heads, sampled=sharing)
        if sum(plan.method == "sample" for plan in plans(m_a)) <= sharing:
            break
        sharing += 1
    planned = plans(m_a)
    looked, probes = (_places(planned, probes) for probes in (False, True))
    return Audit(settings, planned, seed, layers, heads, m_a, looked, probes)


def _places(plans: tuple[AuditPlan, ...], probes: bool) -> NDArray[np.int64]:
    found = [plan.rows.numpy() for plan in plans if plan.probes == probes]
    return np.unique(np.concatenate([*found, np.empty(0, dtype=np.int64)]))
