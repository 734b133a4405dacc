"""What a record alone cannot show: fields that may be changed without contradicting any other.

A replay with the model sees most of them; a signature sees all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from entroprefill_rag.record import AuditRecord


@dataclass(frozen=True)
class Unknown:
    """Fields that cannot be checked without the model.

    Attributes:
        what: the fields, in words.
        why: why not.
        paths: regular expressions of their paths.
        where: whether it applies to a record.
    """

    what: str
    why: str
    paths: tuple[str, ...]
    where: Callable[[AuditRecord], bool] = lambda record: True

    def covers(self, path: str) -> bool:
        """Whether the field at a path is one of these."""
        return any(re.fullmatch(pattern, path) for pattern in self.paths)


def _nothing_drawn(record: AuditRecord) -> bool:
    return record.audit is None or all(info.method == "enumerate" for info in record.audit.observers)


def _no_audit(record: AuditRecord) -> bool:
    return not any(trial.audits for trial in record.trials)


def _nothing_removed(record: AuditRecord) -> bool:
    return not any(trial.removed for trial in record.trials)


def _unwatched(record: AuditRecord) -> bool:
    return record.decode is None


def _nothing_claimed(record: AuditRecord) -> bool:
    return record.outcome != "pruned"


def _no_set(record: AuditRecord) -> bool:
    return not any(trial.pooled_mass for trial in record.trials)


def _evidence_pooled(record: AuditRecord) -> bool:
    return any(trial.evidence for trial in record.trials)


LIMITS: tuple[Unknown, ...] = (
    Unknown(
        "when, with which versions and on which model it ran",
        "no other number depends on them",
        (r"created", r"versions(\..*)?", r"model\.(name|revision|family|dtype|device|kernel|fingerprint|layers)"),
    ),
    Unknown(
        "ids, notes and text, words of probes included",
        "the prompt is named by a hash of its tokens, which only its tokenizer can make",
        (
            r"prompt\.chunks\[\d+\]\.(id|text|title)",
            r"prompt\.(not_admitted|notes)(\[\d+\])?",
            r"prompt\.query",
            r"answer",
            r"config\.audit\.observers\[\d+\]\.queries(\[\d+\])?",
        ),
    ),
    Unknown("where in the suffix the query is", "no claim depends on it", (r"prompt\.query_span.*",)),
    Unknown(
        "the prompt's hash, where no observer is drawn", "no draw depends on it", (r"prompt\.hash",), _nothing_drawn
    ),
    Unknown(
        "settings of the proposal",
        "no claim depends on how a set was found, and masses by which it was found are not all recorded",
        (
            r"config\.(head_weights(\.name)?|entropy_over|tau|zeta|mu_min|mass_min|alpha|lam|rho|m0|theta|streak|evidence)",
            r"config\.(reach|solver_seconds|min_saving|target_saving)",
        ),
    ),
    Unknown(
        "settings that this run had no use for",
        "another value would have given the same record",
        (r"config\.overflow",),
    ),
    Unknown("how many observers to draw, where none is drawn", "", (r"config\.audit\.(m_a|method)",), _nothing_drawn),
    Unknown(
        "what to do while decoding, where nothing was watched",
        "",
        (r"config\.(decode_monitor|on_drift|drift_threshold)",),
        _unwatched,
    ),
    Unknown(
        "caps, solver and dual bound, where no set was looked for",
        "",
        (r"config\.(eps_row|solver|dual_bound).*",),
        _no_set,
    ),
    Unknown(
        "masses as they were read, and what is worded from them alone",
        "only the limits that sums, means and maxima of the same masses set each other are checked",
        (
            r"trials\[\d+\]\.doc_mass",
            r"trials\[\d+\]\.(head_weights|scores|max_discarded_per_(head|row))(\[\d+\])?",
            r"trials\[\d+\]\.row_max(\[\d+\])*",
            r"trials\[\d+\]\.audits\[\d+\]\.(eta_hat|upper|log_wealth)(\[\d+\])?",
        ),
    ),
    Unknown(
        "masses of single chunks, where evidence ranks them",
        "the order follows the evidence, which was read in several heads and is not recorded head by head",
        (r"trials\[\d+\]\.(evidence|pooled_mass)(\[\d+\])?", r"config\.head_weights\.pooled.*"),
        _evidence_pooled,
    ),
    Unknown(
        "what was seen while decoding",
        "a measurement; only its mean, its threshold and what was done are checked against it",
        (r"decode\.(max_per_token|mean).*",),
    ),
    Unknown(
        "prices of the dual bound, where others give the same bound",
        "any prices give a bound; what chunks cost at them is only limited by row maxima",
        (r"trials\[\d+\]\.dual\.(t|chunk_cost|prices).*",),
    ),
    Unknown(
        "chunk boundaries, where no set was found",
        "chunk lengths enter only what a set saves",
        (r"prompt\.chunks\[\d+\]\.(start|end)",),
        _nothing_removed,
    ),
    Unknown(
        "the limit of the audit, where no proposal came to one",
        "nothing was compared with it",
        (r"config\.audit\.eps_audit",),
        _no_audit,
    ),
    Unknown(
        "which attempt it was, where each spends the whole delta",
        "only the ledger has counted them",
        (r"audit\.attempt",),
        lambda record: record.audit is not None and record.audit.attempts == "each",
    ),
    Unknown("whether the draws had been seen, where nothing is claimed", "", (r"replay",), _nothing_claimed),
    Unknown(
        "settings and ranges of a prompt that was not monitored",
        "nothing was done with them",
        (r"config\..*", r"model\.kv_heads", r"prompt\.suffix.*", r"prompt\.chunks"),
        lambda record: record.audit is None,
    ),
)
