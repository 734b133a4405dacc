"""Running a recorded request again, with its model, seed and configuration, and comparing what comes out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.record import AuditRecord, LayerTrial
from entroprefill_rag.verify.facts import config_of
from entroprefill_rag.verify.findings import Finding, Findings
from entroprefill_rag.verify.outcome import given_up

if TYPE_CHECKING:
    from entroprefill_rag.config import PruningConfig
    from entroprefill_rag.engine.backend import LocalBackend
    from entroprefill_rag.request import RagRequest

TOLERANCE = 1e-4
"""Of masses, with the same versions, kernel and type of weights; kernels differ in the order of their sums."""

_SCORES = 1e-2  # logarithms of masses: absolute
_PRICED = 1e-2  # what prices of a linear programme make of masses: relative
_LEFT_OUT = frozenset({"prices", "chunk_cost", "cap_cost", "t", "message", "solver"})


def replay(
    record: AuditRecord, request: RagRequest, backend: LocalBackend, tolerance: float = TOLERANCE
) -> list[Finding]:
    """Run the request again as recorded, up to its first token, and compare layers, draws, sets, masses and verdicts.

    Same draws, same configuration: a replay, which repeats the record's claim and adds none. A set decided by two
    masses that are closer than the kernels' rounding may differ honestly; so may one whose solver ran out of time.

    Args:
        record: what is checked.
        request: what was asked, as ``--save-request`` wrote it.
        backend: the model. One made with ``ledger=False`` keeps no ledger that could refuse the seed.
        tolerance: of masses.

    Returns:
        Differences; empty where the run came out again.

    Raises:
        ConfigError: the record does not hold what a replay needs (a callable as ``head_weights``, probes' words).
    """
    config = _config(record)
    found = Findings()
    ours = backend.model_info
    for name in ("fingerprint", "family", "dtype", "kernel", "layers", "query_heads", "kv_heads"):
        rule = "a replay needs the same model, run in the same way"
        found.expect(f"model.{name}", getattr(record.model, name), getattr(ours, name), rule)
    layout = backend.layout(request, config)
    if not found.expect("prompt.hash", record.prompt.hash, layout.hash, "the request gives the same token ids"):
        return found.found
    # Row maxima are kept of runs that went on to an answer; the others ended with the prefill.
    if record.trials and not record.trials[-1].row_max:
        again = backend.prune(request, config).audit
    else:
        again = backend.generate(request, config, max_new_tokens=1, do_sample=False).audit
    if again.reason.code == "audit_reused":
        found.require(
            False, "audit.seed", "", again.reason.message, "void: audit reused (use a backend without ledger)"
        )
        return found.found
    for name in ("layers", "proposal_rows"):
        found.expect(name, getattr(record, name), getattr(again, name), "the run again")
    if not given_up(record):
        for name in ("outcome", "accepted_layer", "tokens_removed", "retained_ids"):
            found.expect(name, getattr(record, name), getattr(again, name), "the run again")
        found.expect("reason.code", record.reason.code, again.reason.code, "the run again")
    found.expect("audit", _fixed(record), _fixed(again), "planned again from the seed")
    left, right = (
        [one.model_dump(exclude={"text", "title", "kept"}) for one in run.prompt.chunks] for run in (record, again)
    )
    found.expect("prompt.chunks", left, right, "the run again")
    found.expect("trials", len(record.trials), len(again.trials), "the run again")
    for i, (one, other) in enumerate(zip(record.trials, again.trials, strict=False)):
        _compare_trial(f"trials[{i}]", one, other, tolerance, found)
    return found.found


def _config(record: AuditRecord) -> PruningConfig:
    config, plugged_in = config_of(record)
    if plugged_in:
        raise ConfigError(
            f"the record's head weights came from {record.config['head_weights']}, and a record holds only the name of "
            "a callable: such a run cannot be replayed from its record"
        )
    probes = any(observer.kind == "probe_queries" for observer in config.audit.observers)
    if probes and not config.include_text:
        raise ConfigError(
            "the record holds its probe queries by digests only; replay needs a run with include_text=True"
        )
    if record.audit is None:
        return config
    update: dict[str, Any] = {"seed": record.audit.seed}
    # Nothing is decoded again: how an answer was sampled is not in a record.
    watch = {"decode_monitor": False, "on_drift": "record"}
    if record.audit.attempts == "all":
        # The share of this very attempt, whatever the ledger at hand would count.
        update |= {"delta": record.audit.delta, "attempts": "each"}
    return config.model_copy(update={**watch, "audit": config.audit.model_copy(update=update)})


def _fixed(record: AuditRecord) -> dict[str, Any] | None:
    return None if record.audit is None else record.audit.model_dump(exclude={"attempt", "attempts"})


def _compare_trial(path: str, one: LayerTrial, other: LayerTrial, tolerance: float, found: Findings) -> None:
    rule = f"the run again, masses to {tolerance:g}"
    if "time limit" in f"{one.solver}{other.solver}":
        rule += "; its solver ran out of time, so the set need not come out again"
    place = _difference(one.model_dump(), other.model_dump(), tolerance)
    if place is not None:
        found.require(False, path + place[0], place[1], place[2], rule)


def _difference(one: Any, other: Any, tolerance: float) -> tuple[str, Any, Any] | None:
    """First place at which two trials differ by more than rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name, value in one.items():
            if name in _LEFT_OUT:
                continue
            spare = tolerance
            if name == "scores":
                spare = _SCORES
            elif name == "log_wealth":
                # Each of m draws may be off by the tolerance, in units of 1 - eps.
                spare = 2 * tolerance * one["m"] / (1.0 - one["limit"])
            elif name in ("bound", "gap") and isinstance(value, float):
                spare = max(1.0, _PRICED * abs(value))
            elif name in ("envelope", "envelope_per_head"):
                continue  # follows from pooled mass, magnified
            if (place := _difference(value, other[name], spare)) is not None:
                return f".{name}{place[0]}", place[1], place[2]
        return None
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            if (place := _difference(left, right, tolerance)) is not None:
                return f"[{i}]{place[0]}", place[1], place[2]
        return None
    if isinstance(one, float) and isinstance(other, float):
        return None if math.isclose(one, other, rel_tol=0.0, abs_tol=tolerance) else ("", one, other)
    return None if one == other else ("", one, other)
