"""A certificate from end to end: what is fixed beforehand, what is measured, where testing stops, what is said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from entroprefill_rag.certificate.grid import Changes, configurations, default_grid, settings_of
from entroprefill_rag.certificate.losses import work
from entroprefill_rag.certificate.measuring import Measurer
from entroprefill_rag.certificate.pvalues import hoeffding_bentkus, smallest_alpha, smallest_n
from entroprefill_rag.certificate.requests import HeldOut, digest
from entroprefill_rag.certificate.result import Certificate, LossName, Measurement, Tested, Workload
from entroprefill_rag.certificate.rows import Row, Rows, stamp_of
from entroprefill_rag.certificate.words import claim
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import CertificateError, ConfigError, PromptOverflowError

if TYPE_CHECKING:
    from pathlib import Path

    from entroprefill_rag.engine.backend import LocalBackend

NO_GOLD = "no gold chunk"
TOO_LONG = "longer than the model's positions"


def usable(requests: Sequence[HeldOut], loss: LossName) -> tuple[tuple[HeldOut, ...], Counter[str]]:
    """The requests that the loss is defined for, and how many were left out, by reason.

    Raises:
        CertificateError: the loss needs labels and a line has none.
    """
    if loss != "gold_lost":
        return tuple(requests), Counter()
    bare = next((one.line for one in requests if one.gold is None), None)
    if bare is not None:
        raise CertificateError(
            f"the loss gold_lost needs to know the gold chunks, and line {bare} has no label; give every line a list "
            "`gold` of chunk ids (empty where none holds the answer), or use --loss answer_changed or discarded_mass"
        )
    kept = tuple(one for one in requests if one.gold)
    left = Counter({NO_GOLD: len(requests) - len(kept)})
    return kept, +left


def check_levels(n: int, alpha: float, delta: float) -> None:
    """Refuse, before anything slow begins, what could certify nothing.

    Raises:
        CertificateError: alpha or delta is no level, or ``n`` requests without any loss would not be enough.
    """
    for name, value in (("alpha", alpha), ("delta", delta)):
        if not 0.0 < value < 1.0:
            raise CertificateError(f"{name} must lie between 0 and 1, got {value:g}")
    if n < 1:
        raise CertificateError("no request is left to measure: the loss is defined for none of them; add labelled ones")
    if n < (needed := smallest_n(alpha, delta)):
        least = math.ceil(smallest_alpha(n, delta) * 1e4) / 1e4
        raise CertificateError(
            f"{n} requests can certify nothing below alpha = {least:g} at delta = {delta:g}, even if none loses "
            f"anything; for alpha = {alpha:g} it takes {needed} or more: add requests, or raise --alpha or --delta"
        )


def certify(
    backend: LocalBackend,
    requests: Sequence[HeldOut],
    *,
    alpha: float = 0.1,
    delta: float = 0.05,
    loss: LossName = "answer_changed",
    base: PruningConfig | None = None,
    grid: tuple[Changes, ...] | None = None,
    max_new_tokens: int = 32,
    seed: int | None = None,
    resume: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Test a grid in its order on held-out requests, and choose the fastest certified configuration.

    Measuring ends at the first configuration that is not rejected: what comes later cannot be certified.

    Args:
        backend: the model.
        requests: independent draws of the workload, seen by nothing that made the grid or the profile.
        alpha: the expected loss must be shown to be below it.
        delta: probability, over the draw of the requests, that any certified configuration's is not.
        loss: what counts as lost.
        base: what all configurations share.
        grid: changes to it, in the order of testing, safest first; :func:`.grid.default_grid` where None.
        max_new_tokens: longest answer, for ``answer_changed``.
        seed: of the audits' draws while measuring; None takes fresh ones.
        resume: file of rows; what it holds of this very setup is not measured again.
        progress: called with runs done and the most there can be.

    Raises:
        CertificateError: nothing could be certified by so few requests, or the loss cannot be measured.
        ConfigError: configuration and model do not go together.
    """
    if backend.anatomy.why_not is not None:
        raise ConfigError(backend.anatomy.why_not.message)
    base, grid = base or PruningConfig(), default_grid() if grid is None else grid
    configs = configurations(base, grid)
    kept, left = usable(requests, loss)
    check_levels(len(kept), alpha, delta)
    reserve = max_new_tokens if loss == "answer_changed" else 1
    fitting = tuple(one for one in kept if _fits(backend, one, base, reserve))
    left += Counter({TOO_LONG: len(kept) - len(fitting)})
    check_levels(len(fitting), alpha, delta)
    setup = _setup(backend, fitting, configs, loss, max_new_tokens, seed)
    rows = Rows(stamp_of(setup), resume)
    measurer = Measurer(backend, loss, max_new_tokens, seed)
    tested: list[Tested] = []
    for place, (changes, config) in enumerate(zip(grid, configs, strict=True)):
        if tested and not tested[-1].certified:
            tested.append(Tested(changes=changes))
            continue
        found = [_row(measurer, rows, fitting, config, place, at, progress, len(configs)) for at in range(len(fitting))]
        measured = _summary(found, alpha)
        tested.append(Tested(changes=changes, measured=measured, certified=measured.p_value <= delta))
    if progress is not None:
        progress(len(configs) * len(fitting), len(configs) * len(fitting))
    return _certificate(
        setup,
        tested,
        configs,
        base=base,
        alpha=alpha,
        delta=delta,
        workload=Workload(n=len(fitting), digest=setup["requests"], left_out=dict(left)),
    )


def _fits(backend: LocalBackend, one: HeldOut, base: PruningConfig, reserve: int) -> bool:
    """Whether a request fits the model; no place of the grid changes that, as long as none changes `overflow`."""
    try:
        backend.layout(one.request, base, max_new_tokens=reserve)
    except PromptOverflowError:
        return False
    return True


def _setup(
    backend: LocalBackend,
    requests: Sequence[HeldOut],
    configs: Sequence[PruningConfig],
    loss: LossName,
    max_new_tokens: int,
    seed: int | None,
) -> dict[str, Any]:
    """Everything that a measurement depends on."""
    from entroprefill_rag.engine.recording import versions

    info = backend.model_info
    return {
        "model": info.name,
        "fingerprint": info.fingerprint,
        "dtype": info.dtype,
        "profile": backend.profile.name if backend.profile is not None else None,
        "loss": loss,
        "max_new_tokens": max_new_tokens if loss == "answer_changed" else None,
        "seed": seed,
        "requests": digest(requests),
        "configs": [settings_of(config) for config in configs],
        "versions": versions(),
    }


def _row(
    measurer: Measurer,
    rows: Rows,
    requests: Sequence[HeldOut],
    config: PruningConfig,
    place: int,
    at: int,
    progress: Callable[[int, int], None] | None,
    places: int,
) -> Row:
    if progress is not None:
        progress(place * len(requests) + at, places * len(requests))
    known = rows.get(place, at)
    if known is not None:
        return known
    lost, record = measurer.measure(requests[at], config, place=place, request=at)
    saved, full = work(record)
    row = Row(stamp=rows.stamp, place=place, request=at, outcome=record.outcome, loss=lost, saved=saved, full=full)
    rows.add(row)
    return row


def _summary(rows: Sequence[Row], alpha: float) -> Measurement:
    total = math.fsum(row.loss for row in rows)
    return Measurement(
        mean_loss=min(1.0, total / len(rows)),
        total_loss=total,
        p_value=float(hoeffding_bentkus(total, len(rows), alpha)),
        pruned=sum(row.outcome == "pruned" for row in rows),
        saved_work=sum(row.saved for row in rows) / sum(row.full for row in rows),
    )


def _certificate(
    setup: dict[str, Any],
    tested: Sequence[Tested],
    configs: Sequence[PruningConfig],
    *,
    base: PruningConfig,
    alpha: float,
    delta: float,
    workload: Workload,
) -> Certificate:
    saved = [one.measured.saved_work for one in tested if one.certified and one.measured is not None]
    chosen = saved.index(max(saved)) if saved else None
    said = {
        name: setup[name] for name in ("model", "fingerprint", "dtype", "profile", "loss", "max_new_tokens", "seed")
    }
    return Certificate(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=setup["versions"],
        alpha=alpha,
        delta=delta,
        requests=workload,
        base=settings_of(base),
        grid=tuple(tested),
        certified=len(saved),
        chosen=chosen,
        config=None if chosen is None else settings_of(configs[chosen]),
        claim=claim(setup["loss"], alpha=alpha, delta=delta, n=workload.n, certified=len(saved), chosen=chosen),
        **said,
    )
