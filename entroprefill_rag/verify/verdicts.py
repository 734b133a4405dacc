"""Checks of what was decided: each layer's verdict from its numbers, the streak, which layer was first (section 6)."""

from __future__ import annotations

import re

from entroprefill_rag.record import LayerTrial, Reason
from entroprefill_rag.rule.monitor import accepted_message, jaccard_distance
from entroprefill_rag.rule.proposal import NOTHING_FITS
from entroprefill_rag.verify.audits import check_audits
from entroprefill_rag.verify.facts import Facts
from entroprefill_rag.verify.findings import RELATIVE, Findings
from entroprefill_rag.verify.heads import check_heads
from entroprefill_rag.verify.proposals import (
    NOT_PROPOSED,
    check_dual,
    check_masses,
    check_maxima,
    check_order,
    check_set,
)

_NUMBER = r"-?\d+\.\d{4}"


def check_trials(facts: Facts, found: Findings) -> None:
    """Every layer observed, in order; nothing after an accepted one."""
    record = facts.record
    seen = [trial.layer for trial in record.trials]
    found.expect("trials", seen, list(record.layers[: len(seen)]), "monitored layers are observed in order, each once")
    done = next((i for i, trial in enumerate(record.trials) if trial.verdict.code == "accepted"), None)
    if done is not None:
        found.expect("trials", len(record.trials), done + 1, "nothing is observed after a layer was accepted")
    if record.trials:
        found.require(
            record.audit is not None, "audit", None, "what was fixed beforehand", "no layer is tried without an audit"
        )
    streak = _Streak(facts)
    for i, trial in enumerate(record.trials):
        path, last = f"trials[{i}]", i == len(record.trials) - 1
        with found.part(path):
            _check_trial(trial, facts, streak, path, found, last=last)


class _Streak:
    """Consecutive layers that agree on their sets, counted again."""

    def __init__(self, facts: Facts) -> None:
        self._theta = facts.config.theta
        self._count, self._agreed = 0, tuple[int, ...]()

    def step(self, removed: tuple[int, ...]) -> tuple[int, float | None]:
        distance = jaccard_distance(self._agreed, removed) if self._count else None
        agrees = distance is not None and distance <= self._theta
        self._count, self._agreed = (self._count + 1 if agrees else 1), removed
        return self._count, distance

    def reset(self) -> None:
        self._count, self._agreed = 0, ()


def _check_trial(trial: LayerTrial, facts: Facts, streak: _Streak, path: str, found: Findings, *, last: bool) -> None:
    config, code = facts.config, trial.verdict.code
    found.require(0.0 <= trial.doc_mass <= 1.0 + 1e-4, f"{path}.doc_mass", trial.doc_mass, "in [0, 1]", "a mass")
    check_heads(trial, facts, path, found)
    proposed = bool(trial.pooled_mass)
    if not proposed:
        for name, value in NOT_PROPOSED.items():
            found.expect(f"{path}.{name}", getattr(trial, name), value, "the layer ended before a set was looked for")
    elif check_set(trial, facts, path, found):
        check_masses(trial, facts, path, found)
        check_order(trial, facts, path, found)
    count, distance = 0, None
    scheduled = proposed and bool(trial.removed) and trial.tokens_saved >= facts.least
    if scheduled:
        count, distance = streak.step(trial.removed)
    found.expect(f"{path}.streak", trial.streak, count, "consecutive layers whose sets differ by at most theta")
    found.expect(f"{path}.distance", trial.distance, distance, "Jaccard distance to the set before")
    looked = scheduled and count >= config.streak and code not in ("not_finite", "ledger_failed")
    if looked:
        check_audits(trial, facts, path, found)
    else:
        found.expect(f"{path}.audits", len(trial.audits), 0, "audits look only at a proposal that is due")
    _check_last(trial, facts, path, found, proposed=proposed, last=last)
    follows = _verdict(trial, facts, proposed=proposed, looked=looked)
    found.expect(f"{path}.verdict.code", code, follows.code, "decided by the numbers above")
    if follows.code == code:
        matches = re.fullmatch(follows.message, trial.verdict.message, re.DOTALL)
        shown = follows.message.replace("\\", "")
        found.require(
            matches is not None, f"{path}.verdict.message", trial.verdict.message, shown, "worded from the same numbers"
        )
    if code not in ("accepted", "streak"):
        streak.reset()


def _check_last(trial: LayerTrial, facts: Facts, path: str, found: Findings, *, proposed: bool, last: bool) -> None:
    """Row maxima and the dual bound: of the last trial only, both once the run is over."""
    if not last:
        found.expect(f"{path}.row_max", len(trial.row_max), 0, "row maxima are kept of the last trial only")
        found.expect(f"{path}.dual", trial.dual, None, "the dual bound is taken of the last trial only")
        return
    if trial.row_max:
        check_maxima(trial, facts, path, found)
    wanted = bool(trial.row_max) and proposed and facts.config.dual_bound == "lazy"
    found.expect(f"{path}.dual", trial.dual is not None, wanted, "dual_bound, once the run is over")
    check_dual(trial, facts, path, found)


def _verdict(trial: LayerTrial, facts: Facts, *, proposed: bool, looked: bool) -> Reason:
    """What the numbers decide; the message is a regular expression, for a record lacks some of what it was made of."""
    config, share = facts.config, f"{trial.saved_share:.1%}"
    if trial.verdict.code == "not_finite":
        return _not_finite(trial, proposed=proposed)
    # A mass at its limit to nine digits may have been on either side.
    if not proposed and trial.doc_mass < config.mass_min * (1 + RELATIVE):
        text = f"Mean mass on the documents is {trial.doc_mass:.4f}, below mass_min = {config.mass_min:g}."
        return _plain("no_document_mass", text)
    if not proposed and trial.eligible_heads == 0:
        which = "No head that the profile picks" if trial.weighting == "profile" else "No head"
        text = f"{which} places mu_min = {config.mu_min:g} of its attention on the region {config.entropy_over!r}; "
        message = f"{re.escape(text)}the most is {_NUMBER}\\."
        return Reason(code="no_eligible_heads", message=message)
    if not proposed:
        return _plain("a set, or one that the caps leave empty", "")
    if trial.doc_mass < config.mass_min * (1 - RELATIVE):
        return _plain("no_document_mass", "")
    if trial.eligible_heads == 0 and not trial.evidence:
        return _plain("no_eligible_heads", "")
    if not trial.removed:
        return _plain("caps_leave_nothing", NOTHING_FITS[config.reach])
    if trial.tokens_saved < facts.least:
        text = f"The set saves {share} of the chunk tokens, below min_saving = {config.min_saving:.1%}."
        return _plain("below_min_saving", text)
    if trial.verdict.code == "ledger_failed" and trial.streak >= config.streak:
        return Reason(code="ledger_failed", message=".+")
    if not looked:
        return _plain("streak", f"{trial.streak} of {config.streak} consecutive layers agree on the set.")
    failed = next((audit for audit in trial.audits if not audit.accepted), None)
    if failed is None:
        return _plain("accepted", accepted_message(trial))
    return _plain(
        "audit_failed",
        f"Audit {failed.observer!r}: {failed.passed.count(False)} of {len(failed.passed)} heads do not show a mean "
        f"discarded mass of at most {failed.limit:g}; the largest upper bound is {max(failed.upper):.4f}.",
    )


def _not_finite(trial: LayerTrial, *, proposed: bool) -> Reason:
    if proposed:
        return _plain("not_finite", f"Layer {trial.layer}: the audit's attention rows hold NaN or infinity.")
    return _plain("not_finite", f"Layer {trial.layer}: attention rows hold NaN or infinity.")


def _plain(code: str, text: str) -> Reason:
    return Reason(code=code, message=re.escape(text))
