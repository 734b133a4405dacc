"""One call of a backend: what was asked, the run that answers it, and its times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.engine.attempt import Attempt
from entroprefill_rag.engine.recording import build_record, drift_reason
from entroprefill_rag.engine.run import PrefillRun
from entroprefill_rag.errors import ConfigError, RequestError
from entroprefill_rag.prompt import PromptLayout
from entroprefill_rag.record import AuditRecord, DecodeMonitor, LayerTrial, ModelInfo, PruneResult, Reason, Timings
from entroprefill_rag.request import RagRequest
from entroprefill_rag.rule.monitor import Monitor


def checked(request: RagRequest, config: PruningConfig | None) -> PruningConfig:
    """The configuration, the default where none is given.

    Raises:
        RequestError: something else was given for a request.
        ConfigError: something else was given for a configuration.
    """
    if not isinstance(request, RagRequest):
        raise RequestError(
            f"a RagRequest is needed, got {type(request).__name__}; make one with RagRequest(chunks=..., query=...) or "
            "RagRequest.model_validate"
        )
    if config is not None and not isinstance(config, PruningConfig):
        raise ConfigError(
            f"a PruningConfig is needed, got {type(config).__name__}; make one with PruningConfig(...) or "
            "PruningConfig.model_validate"
        )
    return config or PruningConfig()


@dataclass
class Job:
    """One request on its way.

    Attributes:
        generation: arguments for the model's ``generate``.
        monitor: None where nothing will be pruned; `refusal` says why.
        layout_seconds: time spent before the model is entered.
        for_other_model: the retained chunks go to another model.
        attempt: the run's place in the reuse ledger.
        gate: called once the prompt has passed the last layer and its turn is given back; may wait there.
        decode: what was seen while the pruned answer was decoded; None before its end.
        given_up_seconds: time of a pruned run whose answer was given up, from its prefill to its last token.
        given_up_tokens: tokens that it generated.
    """

    request: RagRequest
    config: PruningConfig
    layout: PromptLayout
    generation: dict[str, Any]
    monitor: Monitor | None
    refusal: Reason | None
    run: PrefillRun
    layout_seconds: float
    for_other_model: bool = False
    attempt: Attempt = field(default_factory=Attempt)
    gate: Callable[[], None] | None = None
    wait_seconds: float = 0.0
    idle_seconds: float = 0.0
    ended: float | None = None
    decode: DecodeMonitor | None = None
    given_up_seconds: float = 0.0
    given_up_tokens: int = 0

    @property
    def cancelled(self) -> threading.Event:
        """Set when nobody wants the answer any more."""
        return self.run.cancelled

    @contextmanager
    def turn(self, lock: threading.Lock) -> Iterator[None]:
        """One prefill at a time, which bounds peak memory; given back once the prompt has passed the last layer."""
        started = time.perf_counter()
        while not lock.acquire(timeout=0.05):
            self.run.check_cancelled()
        self.wait_seconds += time.perf_counter() - started
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                lock.release()
                # No audit comes after the prompt: an attempt that read no draw is none.
                self.attempt.release()

        self.run.on_prefilled = lambda: self._after_prefill(give_back)
        try:
            yield
        finally:
            give_back()

    def _after_prefill(self, give_back: Callable[[], None]) -> None:
        give_back()
        if self.gate is not None:
            self.gate()

    def restart(self, seen: DecodeMonitor, tokens: int) -> Reason:
        """Give the pruned answer up after ``tokens`` tokens: what follows is a full prefill of the same prompt.

        Trials and what was seen while decoding stay in the record. Cancelling reaches the new run too.

        Returns:
            Why, as the record will say.
        """
        self.ended = time.perf_counter()
        spent = self.timings()
        self.given_up_seconds = spent.shallow + spent.rule + spent.deep + spent.decode
        self.given_up_tokens = tokens
        self.ended, self.idle_seconds, self.gate = None, 0.0, None
        run = PrefillRun(self.run.anatomy, self.run.n_tokens)
        run.cancelled = self.run.cancelled
        self.run, self.decode = run, seen
        self.refusal = drift_reason(seen, tokens)
        return self.refusal

    def timings(self) -> Timings:
        """Seconds of the parts, as far as the run has come."""
        stamps = self.run.stamps
        now = self.ended if self.ended is not None else time.perf_counter()
        prefilled = stamps.prefilled or stamps.decided or now
        decided = stamps.decided or prefilled
        begin = stamps.begin or decided
        return Timings(
            layout=self.layout_seconds,
            wait=self.wait_seconds,
            shallow=max(0.0, decided - begin - stamps.rule),
            rule=stamps.rule,
            deep=max(0.0, prefilled - decided),
            decode=max(0.0, self.ended - prefilled - self.idle_seconds) if self.ended is not None else 0.0,
            given_up=self.given_up_seconds,
        )

    def record(
        self, model: ModelInfo, *, trials: tuple[LayerTrial, ...] | None = None, answer: str | None = None
    ) -> AuditRecord:
        """The record as far as the run has come; ``trials`` replaces the monitor's own (with a dual bound)."""
        if trials is None:
            trials = tuple(self.monitor.trials) if self.monitor is not None else ()
        return build_record(self, model, trials=trials, answer=answer)

    def outcome(self, model: ModelInfo) -> PruneResult:
        """What is known before the first token."""
        record = self.record(model)
        return PruneResult(
            retained_ids=record.retained_ids,
            dropped_ids=record.dropped_ids,
            protected_ids=record.protected_ids,
            timings=self.timings(),
            audit=record,
        )
