"""One request under one configuration: what it lost and what it saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from entroprefill_rag.certificate.losses import discarded_mass, gold_lost
from entroprefill_rag.certificate.requests import HeldOut
from entroprefill_rag.certificate.result import LossName
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import CertificateError

if TYPE_CHECKING:
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.record import AuditRecord

REUSED = "audit_reused"


@dataclass
class Measurer:
    """Runs requests; keeps the answer of a full prefill once it is needed.

    Attributes:
        backend: the model.
        loss: what counts as lost.
        max_new_tokens: longest answer, where answers are compared.
        seed: of the audits' draws; None takes fresh ones, as the certified configuration will.
    """

    backend: LocalBackend
    loss: LossName
    max_new_tokens: int
    seed: int | None = None
    _full: dict[int, str] = field(default_factory=dict)

    def measure(self, one: HeldOut, config: PruningConfig, *, place: int, request: int) -> tuple[float, AuditRecord]:
        """The loss of a request, and the record of its run.

        Args:
            one: the request.
            config: the configuration.
            place: of the grid.
            request: number of the request; with ``place`` it gives every run draws of its own.

        Raises:
            CertificateError: the loss cannot be read from this configuration's record.
        """
        config = self._seeded(config, place, request)
        if self.loss == "answer_changed":
            changed, record = self._answer_changed(one, config, request)
            self._check(record)
            return changed, record
        record = self.backend.prune(one.request, config).audit
        self._check(record)
        if self.loss == "discarded_mass":
            return discarded_mass(record), record
        if record.outcome != "pruned" or not one.gold:
            return 0.0, record
        return gold_lost(record.dropped_ids, one.gold, any_is_enough=one.any_is_enough), record

    def _answer_changed(self, one: HeldOut, config: PruningConfig, request: int) -> tuple[float, AuditRecord]:
        # A bypassed request is answered in full: it is not worth decoding.
        with self.backend.begin(one.request, config, **self._greedy()) as pending:
            if not pending.outcome.pruned:
                return 0.0, pending.outcome.audit
            result = pending.result()
        if not result.pruned:  # given up while decoding, and answered in full
            return 0.0, result.audit
        if request not in self._full:
            off = PruningConfig(enabled=False, sink_tokens=config.sink_tokens, overflow=config.overflow)
            self._full[request] = self.backend.generate(one.request, off, **self._greedy()).answer
        return float(result.answer != self._full[request]), result.audit

    def _greedy(self) -> dict[str, int | bool]:
        return {"max_new_tokens": self.max_new_tokens, "do_sample": False}

    def _seeded(self, config: PruningConfig, place: int, request: int) -> PruningConfig:
        if self.seed is None:
            return config
        # One seed for all would make their draws depend on each other, and the ledger would refuse the second place.
        drawn = int(np.random.SeedSequence([self.seed, place, request]).generate_state(1, np.uint32)[0])
        return config.model_copy(update={"audit": config.audit.model_copy(update={"seed": drawn})})

    @staticmethod
    def _check(record: AuditRecord) -> None:
        if record.reason.code == REUSED:
            raise CertificateError(
                "a request was answered in full because its audit's draws had been seen before; such a run says "
                "nothing of the configuration: use another --seed, none, or a backend with a fresh ledger"
            )
