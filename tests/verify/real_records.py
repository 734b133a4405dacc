"""Records of real runs of a tiny model, one for each way that a run can go."""

from __future__ import annotations

import functools

import tiny

from entroprefill_rag import AuditConfig, AuditRecord, LocalBackend, PruningConfig, RagRequest
from entroprefill_rag.config import HeadProfile, ProbeQueries, PromptRows, SuffixRows, WeightedRows

SAMPLED = AuditConfig(eps_audit=0.95, m_a=64, observers=(SuffixRows(), PromptRows()), seed=11)


def loose(*, audit: AuditConfig = SAMPLED, **more: object) -> PruningConfig:
    """Caps that a random model passes, with something of one's own."""
    return tiny.LOOSE.model_copy(update={"audit": audit, **more})


def audit(**more: object) -> AuditConfig:
    """The audit of :func:`loose`, with something of one's own."""
    return AuditConfig.model_validate({**SAMPLED.model_dump(), **more})


CONFIGS: dict[str, PruningConfig] = {
    "pruned": loose(),
    "hoeffding": loose(audit=audit(bound="hoeffding")),
    "kl": loose(audit=audit(bound="kl")),
    "empirical_bernstein": loose(audit=audit(bound="empirical_bernstein")),
    "sequential": loose(audit=audit(sequential=True)),
    "weighted": loose(audit=audit(observers=(WeightedRows(decay=0.9),), method="enumerate", union="layers")),
    "weighted_sampled": loose(audit=audit(observers=(WeightedRows(),), method="sample", m_a="auto", seed=None)),
    "streak": loose(layers=(1, 2, 3, 4), streak=2, theta=1.0, mass_min=0.3),
    "own_caps": loose(eps_row=(0.9, 0.8, 0.95)),
    "relative": loose(rho=0.9),
    "exact": loose(solver="exact", include_text=True, dual_bound="never"),
    "capped": loose(eps_row=0.35, min_saving=0.0),
    "auto_layers": loose(layers="auto"),
    "audit_failed": loose(layers=(2,), audit=audit(eps_audit=0.02, method="enumerate", m_a="auto")),
    "sequential_failed": loose(layers=(2,), audit=audit(eps_audit=0.3, sequential=True, method="sample")),
    "too_little_saved": loose(eps_row=0.7, min_saving=0.45),
    "no_room": loose(eps_row=1e-6),
    "no_mass": loose(mass_min=0.99),
    "no_heads": loose(mu_min=0.999),
    "too_few_chunks": loose(m0=5),
    "probes": loose(audit=audit(observers=(SuffixRows(), ProbeQueries(queries=("Who?", "Where is it?", "When?"))))),
    "off": loose(enabled=False),
    "drift_stop": loose(on_drift="stop", drift_threshold=0.05),
    "drift_restart": loose(on_drift="restart_full", drift_threshold=0.05),
    "profile": loose(head_weights=HeadProfile(name="of a test", weights=((2, (0.5, 0.0, 0.3, 0.2)),))),
    "pooled": loose(
        head_weights=HeadProfile(
            name="of a test",
            weights=((2, (0.5, 0.0, 0.3, 0.2)),),
            pooled=((2, ((1, 3, 0.5), (2, 0, 0.5))), (3, ((1, 3, 1.0),))),
        ),
        eps_row=0.6,
        min_saving=0.0,
    ),
    "capped_all": loose(eps_row=0.35, min_saving=0.0, reach="all"),
    "replayed": loose(),
    "second_attempt": loose(audit=audit(attempts="all", seed=None, m_a="auto", eps_audit=0.1, method="sample")),
}

COUNTED = ("replayed", "second_attempt")
"""Run twice, by a backend that counts."""


@functools.cache
def backend() -> LocalBackend:
    """A tiny model, ready."""
    return LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny", ledger=False)


def request() -> RagRequest:
    """Five chunks of different lengths, one of them protected by its caller."""
    asked = tiny.request()
    chunks = [
        chunk.model_copy(update={"text": chunk.text + " and more" * i, "protected": i == 2})
        for i, chunk in enumerate(asked.chunks)
    ]
    return asked.model_copy(update={"chunks": tuple(chunks)})


@functools.cache
def record_of(name: str) -> AuditRecord:
    """The record of one of :data:`CONFIGS`."""
    if name in COUNTED:
        with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny") as counting:
            for _ in range(2):
                record = counting.generate(request(), CONFIGS[name], max_new_tokens=4, do_sample=False).audit
        return record
    return backend().generate(request(), CONFIGS[name], max_new_tokens=4, do_sample=False).audit
