"""Checks of the audit: what was fixed beforehand, drawn again from the seed, and each head's verdict (section 6)."""

from __future__ import annotations

import numpy as np

from entroprefill_rag.record import AuditResult, LayerTrial, ObserverInfo
from entroprefill_rag.rule.audit import plan_audit, significant
from entroprefill_rag.rule.bounds import exact_mean, recheck, smallest_m, statements
from entroprefill_rag.rule.concentration import empirical_bernstein_upper, hoeffding_upper, kl_upper
from entroprefill_rag.rule.sequential import batch_slices
from entroprefill_rag.verify.bets import upper_range, wealth_range
from entroprefill_rag.verify.facts import Facts
from entroprefill_rag.verify.findings import RELATIVE, Findings, close

LEEWAY = 1e-8


def check_setup(facts: Facts, found: Findings) -> None:
    """What was fixed before any attention was seen, planned again."""
    record, settings = facts.record, facts.config.audit
    setup = record.audit
    if setup is None:
        return
    for name in ("bound", "union", "sequential", "attempts"):
        found.expect(f"audit.{name}", getattr(setup, name), getattr(settings, name), "as configured")
    found.expect("audit.query_heads", setup.query_heads, record.model.query_heads, "the model's")
    if settings.seed is not None:
        found.expect("audit.seed", setup.seed, settings.seed, "the seed configured")
    if record.layers:
        found.expect("audit.monitored_layers", setup.monitored_layers, len(record.layers), "J counts monitored layers")
    spent = spent_delta(facts, found)
    found.expect("audit.delta", setup.delta, spent, "what this attempt may spend of the delta configured")
    planned = plan_audit(
        settings.model_copy(update={"delta": spent}),
        document_block=facts.document_block,
        suffix=record.prompt.suffix,
        layers=setup.monitored_layers,
        heads=setup.query_heads,
        seed=setup.seed,
        prompt_hash=record.prompt.hash,
    )
    found.expect("audit.m_a", setup.m_a, planned.m_a, "as configured, or from the smallest number that can pass")
    rule = "planned from the configuration, the prompt's ranges, its hash and the seed"
    if not found.expect("audit.observers", len(setup.observers), len(planned.plans), "as configured"):
        return
    for i, (info, plan, observer) in enumerate(zip(setup.observers, planned.plans, settings.observers, strict=True)):
        follows = ObserverInfo(
            kind=plan.kind,
            support=plan.support,
            method=plan.method,
            rows=tuple(plan.rows.tolist()),
            weights=None if plan.weights is None else significant(plan.weights.tolist()),
            decay=getattr(observer, "decay", None),
            delta=plan.delta,
        )
        found.expect(f"audit.observers[{i}]", info.model_dump(), follows.model_dump(), rule)


def spent_delta(facts: Facts, found: Findings) -> float:
    """The delta of this attempt: all of it, or ``delta / (r (r + 1))`` where all attempts share it (correction 1)."""
    setup, delta = facts.record.audit, facts.config.audit.delta
    attempt = None if setup is None else setup.attempt
    if attempt is not None:
        found.require(attempt >= 1, "audit.attempt", attempt, "at least 1", "attempts are counted from 1")
    if facts.config.audit.attempts == "each":
        return delta
    if attempt is None or attempt < 1:
        found.expect("audit.attempt", attempt, "a number", "attempts='all' needs the attempts counted")
        return delta
    return delta / (attempt * (attempt + 1))


def check_audits(trial: LayerTrial, facts: Facts, path: str, found: Findings) -> None:
    """Every observer distribution's look at one proposal."""
    setup = facts.record.audit
    if setup is None:
        return
    due = _due(trial, setup.observers, sequential=setup.sequential)
    rule = "every distribution looks at a proposal; once one has failed, a sequential audit and probes are left out"
    kinds = [result.observer for result in trial.audits]
    if not found.expect(f"{path}.audits", kinds, [info.kind for info in due], rule):
        return
    for i, (result, info) in enumerate(zip(trial.audits, due, strict=True)):
        place = f"{path}.audits[{i}]"
        with found.part(place):
            _check_fixed(result, info, trial, facts, place, found)
            heads = setup.query_heads
            lengths = [len(result.eta_hat), len(result.upper), len(result.passed)]
            if found.expect(place, lengths, [heads] * 3, "eta_hat, upper and passed hold one entry per query head"):
                _check_heads(result, place, found)
                _check_caps(result, info, trial, facts, place, found)


def _due(trial: LayerTrial, observers: tuple[ObserverInfo, ...], *, sequential: bool) -> tuple[ObserverInfo, ...]:
    """The distributions that had to look: rows before probes, enumerated before sampled, until one failed."""
    accepted = {result.observer: result.accepted for result in trial.audits}
    due, failed = set(), False
    for info in sorted(observers, key=lambda info: (info.kind == "probe_queries", info.method == "sample")):
        if failed and (sequential or info.kind == "probe_queries"):
            break
        due.add(info.kind)
        failed |= not accepted.get(info.kind, True)
    return tuple(info for info in observers if info.kind in due)


def _check_fixed(
    result: AuditResult, info: ObserverInfo, trial: LayerTrial, facts: Facts, path: str, found: Findings
) -> None:
    setup = facts.record.audit
    if setup is None:
        return
    sampled = info.method == "sample"
    for name, value in (
        ("observer", info.kind),
        ("method", info.method),
        ("bound", setup.bound if sampled else "exact"),
        ("limit", facts.config.audit.eps_audit),
    ):
        found.expect(f"{path}.{name}", getattr(result, name), value, "as fixed beforehand")
    level = None
    if sampled and info.delta is not None:
        level = info.delta / statements(setup.union, setup.monitored_layers, setup.query_heads)
    found.expect(f"{path}.level", result.level, level, "the distribution's delta over the statements that share it")
    share = None
    if info.kind == "prompt_rows":
        share = 1.0 - trial.tokens_saved / info.support
    found.expect(f"{path}.retained_share", result.retained_share, share, "one less the removed share of the support")
    _check_count(result, info, sequential=setup.sequential and sampled, path=path, found=found)


def _check_count(result: AuditResult, info: ObserverInfo, *, sequential: bool, path: str, found: Findings) -> None:
    drawn = len(info.rows)
    if not sequential:
        found.expect(f"{path}.m", result.m, drawn, "every row fixed beforehand is looked at")
        found.expect(f"{path}.announced", result.announced, None, "only a sequential audit announces draws")
        found.expect(f"{path}.ended", result.ended, None, "only a sequential audit ends early")
        return
    found.expect(f"{path}.announced", result.announced, drawn, "the rows fixed beforehand")
    if result.level is not None:
        first = smallest_m(result.bound, result.limit, result.level)
        ends = [part.stop for part in batch_slices(drawn, first)]
        rule = "draws are looked at in batches, the first of the smallest number that could pass"
        found.require(result.m in ends, f"{path}.m", result.m, f"one of {ends}", rule)
    found.expect(f"{path}.ended", result.ended == "passed", result.accepted, "'passed' where every head passed")
    found.require(
        result.ended is not None and (result.ended != "exhausted" or result.m == drawn),
        f"{path}.ended",
        result.ended,
        "passed, hopeless, or exhausted after all draws",
        "an undecided audit goes on",
    )


def _check_heads(result: AuditResult, path: str, found: Findings) -> None:
    """Means, bounds and verdicts of every head, each from the numbers it came from."""
    eta, upper, passed = np.array(result.eta_hat), np.array(result.upper), np.array(result.passed)
    heads, eps = len(eta), result.limit
    found.between(f"{path}.eta_hat", eta.tolist(), [0.0] * heads, upper.tolist(), "a mean is at most its bound")
    betting, bernstein = result.bound == "betting", result.bound == "empirical_bernstein"
    for name, wanted in (("log_wealth", betting), ("variance", bernstein)):
        value = getattr(result, name)
        length = heads if wanted else None
        found.expect(f"{path}.{name}", None if value is None else len(value), length, f"for bound {result.bound!r}")
    wealth = None if result.log_wealth is None else np.array(result.log_wealth)
    variance = None if result.variance is None else np.array(result.variance)
    numbers = {"eps": eps, "level": result.level, "m": result.m, "eta_hat": eta, "upper": upper}
    worst, best = (
        recheck(result.bound, **numbers, log_wealth=wealth, variance=variance, leeway=leeway)  # type: ignore[arg-type]
        for leeway in (-LEEWAY, LEEWAY)
    )
    for h in range(heads):
        decided = bool(best[h]) if passed[h] else bool(worst[h])
        found.expect(f"{path}.passed[{h}]", bool(passed[h]), decided, f"decided by the {result.bound} bound")
    found.expect(f"{path}.accepted", result.accepted, bool(passed.all()), "accepted where every head passed")
    # A bound lies on the side of the limit that its verdict says.
    for h, value in enumerate(upper.tolist()):
        side = value <= eps * (1 + RELATIVE) if passed[h] else value > eps * (1 - RELATIVE)
        limit = f"{'at most' if passed[h] else 'above'} {eps:g}"
        found.require(side, f"{path}.upper[{h}]", value, limit, "on the side of the limit that the verdict says")
    _check_bounds(result, eta, upper, passed, path, found)


def _check_bounds(
    result: AuditResult, eta: np.ndarray, upper: np.ndarray, passed: np.ndarray, path: str, found: Findings
) -> None:
    eps, level, m = result.limit, result.level, result.m
    if result.bound == "exact" or level is None:
        found.expect(f"{path}.upper", upper.tolist(), eta.tolist(), "an exact mean is its own bound")
        return
    if result.bound == "betting":
        if result.log_wealth is None:
            return
        low, high = wealth_range(eta, m, eps)
        found.between(
            f"{path}.log_wealth",
            list(result.log_wealth),
            (low * (1 - 1e-6) - 1e-6).tolist(),
            (high * (1 + 1e-6) + 1e-6).tolist(),
            f"the wealth that {m} losses of this mean can give",
        )
        low, high = upper_range(eta, m, level)
        low = np.where(passed, np.minimum(low, eps), np.maximum(low, eps))
        high = np.where(passed, np.minimum(high, eps), np.maximum(high, eps))
        rule = f"what {m} losses of this mean can give"
        found.between(f"{path}.upper", upper.tolist(), low.tolist(), high.tolist(), rule)
        return
    if result.bound == "hoeffding":
        follows = hoeffding_upper(eta, m, level)
    elif result.bound == "kl":
        follows = kl_upper(eta, m, level)
    else:
        if result.variance is None:
            return
        variance = np.array(result.variance)
        largest = (eta * (1.0 - eta) * m / (m - 1)).tolist()
        rule = "a variance of masses of this mean"
        found.between(f"{path}.variance", variance.tolist(), [0.0] * len(eta), largest, rule)
        follows = empirical_bernstein_upper(eta, variance, m, level)
    # Inversion stops at a resolution; the verdict at the limit does not.
    if result.bound == "kl":
        follows = np.where(passed, np.minimum(follows, eps), np.maximum(follows, eps))
    found.expect(f"{path}.upper", upper.tolist(), follows.tolist(), f"the {result.bound} bound at eta_hat, m and level")


def _check_caps(
    result: AuditResult, info: ObserverInfo, trial: LayerTrial, facts: Facts, path: str, found: Findings
) -> None:
    """Whether the caps alone imply the statement: a proposal row loses at most its cap, a removed one nothing."""
    implied = False
    if info.method == "enumerate" and info.kind != "probe_queries":
        cap = dict(zip(facts.rows, facts.caps.tolist(), strict=True))
        gone = {
            place
            for i in trial.removed
            for place in range(facts.record.prompt.chunks[i].start, facts.record.prompt.chunks[i].end)
        }
        allowed = np.array([0.0 if row in gone else cap.get(row, 1.0) for row in info.rows])
        weights = np.ones(len(allowed)) if info.weights is None else np.array(info.weights)
        implied = bool(exact_mean(allowed[None], weights, result.limit).passed[0])
        if info.weights is not None and close(float(allowed @ weights / weights.sum()), result.limit):
            return  # weights are rounded: either may have been right
    found.expect(f"{path}.caps_imply", result.caps_imply, implied, "the largest mean that the caps allow")
