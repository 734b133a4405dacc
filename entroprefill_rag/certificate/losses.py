"""The losses: one number in [0, 1] per request and configuration, 0 where the request was answered in full."""

from __future__ import annotations

from collections.abc import Collection

from entroprefill_rag.errors import CertificateError
from entroprefill_rag.record import AuditRecord

MEANINGS = {
    "answer_changed": "1 where the greedy answer's text differs from that of a full prefill, else 0",
    "gold_lost": "share of a request's gold chunks that were removed; where any one of them is enough (gold_need "
    "'any'), 1 if all were removed, else 0",
    "discarded_mass": "mean over the suffix rows of the attention on removed chunks at the accepted layer, in the head "
    "where it is largest",
}


def gold_lost(dropped: Collection[str], gold: Collection[str], *, any_is_enough: bool) -> float:
    """Share of the gold chunks that were removed; with ``any_is_enough``, whether all were.

    A chunk that never came into the prompt (``overflow="drop_last"``) was not removed by pruning.

    Args:
        dropped: ids of the removed chunks.
        gold: ids of the chunks that hold the answer, at least one.
        any_is_enough: the question needs only one of them.
    """
    wanted = set(gold)
    lost = len(wanted & set(dropped)) / len(wanted)
    return float(lost == 1.0) if any_is_enough else lost


def discarded_mass(record: AuditRecord) -> float:
    """Largest over heads of ``eta_hat`` of the accepted trial's audit of suffix rows; 0 where nothing was removed.

    Only an enumerated audit will do: there ``eta_hat`` is the exact mean over the suffix. A sampled one passed because
    its draws lost little, so what they lost is too small on average.

    Raises:
        CertificateError: the audit has no suffix rows, or drew from them.
    """
    if record.outcome != "pruned" or record.trial is None:
        return 0.0
    audit = next((one for one in record.trial.audits if one.observer == "suffix_rows"), None)
    if audit is None:
        raise CertificateError(
            "the loss discarded_mass is read from the audit of suffix rows, and this configuration has none; add "
            "suffix_rows to audit.observers"
        )
    if audit.method != "enumerate":
        raise CertificateError(
            f"the loss discarded_mass needs all suffix rows, and of a prompt with a long question only {audit.m} were "
            "drawn; set audit.method='enumerate', or audit.m_a to the longest suffix"
        )
    return min(1.0, max(0.0, *audit.eta_hat))


def work(record: AuditRecord) -> tuple[int, int]:
    """Tokens x layers that were not run, and those of a full prefill.

    The accepted layer still holds every token; the layers above it run on the retained ones.
    """
    total = record.prompt.tokens * record.model.layers
    if record.outcome != "pruned" or record.accepted_layer is None:
        return 0, total
    return record.tokens_removed * (record.model.layers - 1 - record.accepted_layer), total
