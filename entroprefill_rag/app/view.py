"""A record as what the page shows: plain data, every text of strangers cleaned, no markup anywhere."""

from __future__ import annotations

from typing import Any

from entroprefill_rag.chat.session import Exchange
from entroprefill_rag.record import AuditRecord, LayerTrial
from entroprefill_rag.report.drift import drift_line
from entroprefill_rag.report.plain import one_line, plain
from entroprefill_rag.report.sources import sources_of
from entroprefill_rag.report.terms import TERMS

_LONGEST_TEXT = 4_000
_TERMS = ("doc_mass", "saved", "max_discarded", "bound_limit", "mass_share", "evidence", "score", "verdict")


def terms() -> dict[str, dict[str, str]]:
    """What the page's numbers say, for its legends."""
    return {name: {"label": TERMS[name].label, "text": TERMS[name].text} for name in _TERMS}


def decision(exchange: Exchange) -> dict[str, Any]:
    """What was decided, known before the first token."""
    record = exchange.record
    return {
        "outcome": record.outcome,
        "headline": _headline(record),
        "reason": {"code": record.reason.code, "message": one_line(record.reason.message, 400)},
        "first_token": exchange.timings.first_token,
        "sources": _sources(exchange),
        "layers": _layers(record),
        "layers_of_model": record.model.layers,
        "claims": {
            name: plain(text)
            for name in ("exact", "probabilistic", "conditional")
            if (text := getattr(record.claims, name))
        },
        "not_claimed": [one_line(text, 400) for text in record.claims.not_claimed],
        "warnings": [one_line(text, 400) for text in (*record.claims.warnings, *record.prompt.notes)],
    }


def run(exchange: Exchange) -> dict[str, Any]:
    """What an answer took."""
    usage, timings = exchange.usage, exchange.timings
    return {
        "first_token": timings.first_token,
        "wait": timings.wait,
        "total": timings.first_token + timings.decode,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "kept_tokens": usage.kept_tokens if usage else None,
        "generated_tokens": usage.generated_tokens if usage else None,
        "drift": drift_line(exchange.record.decode) if exchange.record.decode is not None else None,
    }


def _headline(record: AuditRecord) -> str:
    chunks = len(record.prompt.chunks)
    if record.outcome == "pruned":
        return f"{len(record.dropped_ids)} of {chunks} chunks dropped after layer {record.accepted_layer}"
    return (
        f"{'Not pruned' if record.outcome == 'bypassed' else 'Pruning is off'}: all {chunks} chunks were read in full"
    )


def _sources(exchange: Exchange) -> list[dict[str, Any]]:
    texts = {chunk.id: chunk.text for chunk in exchange.request.chunks}
    return [
        {
            "number": source.number,
            "title": one_line(source.title, 120),
            "path": one_line(source.path or source.id, 160),
            "status": source.status,
            "reason": None if source.reason is None else one_line(source.reason),
            "tokens": source.tokens,
            "score": source.score,
            "share": source.mass_share,
            "evidence": source.evidence,
            "text": plain(texts.get(source.id, "")[:_LONGEST_TEXT]),
        }
        for source in sources_of(exchange.record, exchange.request.chunks)
    ]


def _layers(record: AuditRecord) -> list[dict[str, Any]]:
    """Every monitored layer, those that were not reached too."""
    tried = {trial.layer: trial for trial in record.trials}
    return [
        _layer(record, tried[layer]) if layer in tried else {"layer": layer, "state": "not reached"}
        for layer in sorted({*record.layers, *tried})
    ]


def _layer(record: AuditRecord, trial: LayerTrial) -> dict[str, Any]:
    cap = record.config.get("eps_row")
    return {
        "layer": trial.layer,
        "state": "accepted" if trial.layer == record.accepted_layer else "rejected",
        "doc_mass": trial.doc_mass,
        "saved_tokens": trial.tokens_saved if trial.removed else None,
        "saved_share": trial.saved_share if trial.removed else None,
        "worst_row": trial.max_discarded,
        "cap": cap if isinstance(cap, (int, float)) else None,
        "audits": [
            {
                "observer": audit.observer,
                "bound": max(audit.upper, default=0.0),
                "limit": audit.limit,
                "exact": audit.method == "enumerate",
                "passed": audit.accepted,
            }
            for audit in trial.audits
        ],
        "verdict": {"code": trial.verdict.code, "message": one_line(trial.verdict.message, 400)},
    }
