"""Turns what one run saw into its record."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
import transformers

from entroprefill_rag import __version__
from entroprefill_rag.claims import describe
from entroprefill_rag.config import ProbeQueries, PruningConfig
from entroprefill_rag.record import (
    AuditRecord,
    ChunkInfo,
    Claims,
    DecodeMonitor,
    LayerTrial,
    ModelInfo,
    Outcome,
    PromptInfo,
    Reason,
)

if TYPE_CHECKING:
    from entroprefill_rag.engine.job import Job

OFF = Reason(code="off", message="Pruning was switched off; the prompt was prefilled in full.")


def versions() -> dict[str, str]:
    """Versions of the libraries whose behaviour a record depends on."""
    found = {"entroprefill_rag": __version__, "python": platform.python_version(), "torch": torch.__version__}
    found["transformers"] = transformers.__version__
    for name in ("scipy", "numpy", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def build_record(job: Job, model: ModelInfo, *, trials: tuple[LayerTrial, ...], answer: str | None) -> AuditRecord:
    """The record of one call.

    Args:
        job: what was asked and what its run saw. Text goes in only with ``include_text``.
        model: the model that ran.
        trials: the monitored layers' trials, with the dual bound where it has been computed.
        answer: the generated text, if there is one.
    """
    layout, config, monitor = job.layout, job.config, job.monitor
    accepted = next((trial for trial in trials if trial.layer == job.run.layer), None)
    removed = frozenset(accepted.removed) if accepted is not None else frozenset()
    texts = {chunk.id: chunk for chunk in job.request.chunks} if config.include_text else {}
    chunks = tuple(
        ChunkInfo(
            id=chunk_id,
            start=start,
            end=end,
            protected=reason,
            kept=position not in removed,
            text=texts[chunk_id].text if texts else None,
            title=texts[chunk_id].title if texts else None,
        )
        for position, (chunk_id, (start, end), reason) in enumerate(
            zip(layout.chunk_ids, layout.chunk_spans, layout.protected_reasons, strict=True)
        )
    )
    outcome, reason = _outcome(job, accepted)
    setup = monitor.setup() if monitor is not None else None
    if setup is not None:
        setup = setup.model_copy(update={"attempts": config.audit.attempts, "attempt": job.attempt.number})
    claims = Claims()
    if accepted is not None and setup is not None and monitor is not None:
        claims = describe(
            accepted,
            setup,
            chunks,
            rows=len(monitor.proposal_rows),
            for_other_model=job.for_other_model,
            seeded=config.audit.seed is not None,
            replay=job.attempt.replay,
        )
    return AuditRecord(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        model=model,
        prompt=PromptInfo(
            hash=layout.hash,
            tokens=layout.n_tokens,
            chunks=chunks,
            sink_tokens=layout.sink_tokens,
            suffix=layout.suffix_span,
            query_span=layout.query_span,
            not_admitted=layout.not_admitted,
            notes=layout.notes,
            query=job.request.query if config.include_text else None,
        ),
        config=told_config(config),
        layers=monitor.layers if monitor is not None else (),
        proposal_rows=tuple(int(row) for row in monitor.proposal_rows) if monitor is not None else (),
        audit=setup,
        replay=job.attempt.replay,
        trials=trials,
        outcome=outcome,
        accepted_layer=accepted.layer if accepted is not None else None,
        reason=reason,
        tokens_removed=accepted.tokens_saved if accepted is not None else 0,
        decode=job.decode,
        claims=claims,
        answer=answer if config.include_text else None,
    )


def drift_reason(seen: DecodeMonitor, tokens: int) -> Reason:
    """Why a pruned answer of ``tokens`` tokens was given up for one from a full prefill."""
    place = seen.first_above or 0
    mass = seen.max_per_token[place]
    message = (
        f"Generated token {place + 1} placed {mass:.4g} of a head's attention at layer {seen.layer} on the removed "
        f"chunks, above {seen.threshold:g}: the pruned answer was given up after {tokens} tokens, and the prompt was "
        "prefilled in full."
    )
    return Reason(code="drift_restart", message=message)


def told_config(config: PruningConfig) -> dict[str, Any]:
    """The configuration as a record holds it: without ``include_text``, probe queries by their digests."""
    data = config.model_dump(mode="json")
    if not config.include_text:
        for observer, told in zip(config.audit.observers, data["audit"]["observers"], strict=True):
            if isinstance(observer, ProbeQueries):
                told["queries"] = list(observer.digests)
    return data


def _outcome(job: Job, accepted: LayerTrial | None) -> tuple[Outcome, Reason]:
    if accepted is not None:
        return "pruned", accepted.verdict
    if not job.config.enabled:
        return "off", OFF
    refusal = job.refusal or job.run.refusal
    if refusal is not None:
        return "bypassed", refusal
    if job.monitor is not None:
        return "bypassed", job.monitor.reason()
    return "bypassed", Reason(code="not_run", message="The run ended before a monitored layer was reached.")
