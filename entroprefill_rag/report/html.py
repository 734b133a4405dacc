"""A record as one HTML page: no script, no network, nothing of a stranger's that a browser would obey.

The template escapes every value; before that, :func:`~entroprefill_rag.report.plain.plain` takes out control characters
and text directions. A content security policy in the page refuses whatever would be loaded all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from entroprefill_rag.record import AuditRecord, AuditResult, DecodeMonitor, LayerTrial
from entroprefill_rag.report.plain import plain
from entroprefill_rag.report.sources import sources_of
from entroprefill_rag.report.terms import TERMS
from entroprefill_rag.request import Chunk

# More bars than this are drawn as the largest of each group of tokens: a screen has no room for more.
_BARS = 300
# Colour of the smallest and of the largest mass, as opacity: none of them is invisible.
_FAINTEST, _FULL = 0.06, 1.0


def html_report(record: AuditRecord, chunks: Sequence[Chunk] = ()) -> str:
    """The page.

    Args:
        record: any record, of whatever outcome.
        chunks: the request's chunks, for titles, paths and scores; a record alone knows ids only, unless it was made
            with ``include_text``.
    """
    trial = record.trial
    return (
        _environment()
        .get_template("record.html")
        .render(
            record=record,
            trial=trial,
            terms=TERMS,
            sources=sources_of(record, chunks),
            texts={info.id: info.text for info in record.prompt.chunks if info.text is not None},
            chunk_tokens=sum(info.end - info.start for info in record.prompt.chunks),
            strip=_strip(record),
            heat=_heat(record),
            heads=_heads(record, trial) if trial is not None else [],
            audits=[_AuditView.of(audit) for audit in trial.audits] if trial is not None else [],
            cap=_cap(record),
            decode=_DecodeView.of(record.decode) if record.decode is not None else None,
            settings=_settings(record.config),
        )
    )


@dataclass(frozen=True)
class _Segment:
    """A stretch of the prompt's strip: left edge and width in percent, colour as opacity; no chunk where None."""

    left: float
    width: float
    opacity: float
    position: int | None
    kept: bool
    about: str


def _strip(record: AuditRecord) -> list[_Segment]:
    """The prompt from its first token to its last; what lies between chunks is template and instruction."""
    n = max(record.prompt.tokens, 1)
    masses = record.trial.pooled_mass if record.trial is not None else ()
    most, total = max(masses, default=0.0), sum(masses)
    made: list[_Segment] = []
    at = 0
    for position, info in enumerate(record.prompt.chunks):
        if info.start > at:
            made.append(_between(at, info.start, n, "instruction and template" if not made else "delimiter"))
        mass = masses[position] if position < len(masses) else 0.0
        share = f", {mass / total:.0%} of the attention on chunks" if total > 0 else ""
        state = "dropped" if not info.kept else "protected" if info.protected else "kept"
        made.append(
            _Segment(
                100 * info.start / n,
                100 * (info.end - info.start) / n,
                _opacity(mass, most),
                position,
                info.kept,
                f"{position + 1}. {info.id}: {state}, {info.end - info.start} tokens{share}",
            )
        )
        at = info.end
    if n > at:
        made.append(_between(at, n, n, "query and template"))
    return made


def _between(start: int, end: int, n: int, what: str) -> _Segment:
    return _Segment(100 * start / n, 100 * (end - start) / n, 0.0, None, True, f"{what}, {end - start} tokens")


@dataclass(frozen=True)
class _HeatRow:
    """One layer of the heat map; no cells where its rows were not pooled."""

    layer: int
    accepted: bool
    cells: tuple[tuple[float, float, bool], ...]  # opacity, mass, proposed for removal


def _heat(record: AuditRecord) -> list[_HeatRow]:
    most = max((mass for trial in record.trials for mass in trial.pooled_mass), default=0.0)
    return [
        _HeatRow(
            trial.layer,
            trial.layer == record.accepted_layer,
            tuple((_opacity(mass, most), mass, i in trial.removed) for i, mass in enumerate(trial.pooled_mass)),
        )
        for trial in record.trials
    ]


def _heads(record: AuditRecord, trial: LayerTrial) -> list[dict[str, Any]]:
    """Heads by weight, the heaviest first."""
    most = max(trial.head_weights, default=0.0)
    size = max(record.model.query_heads // max(record.model.kv_heads, 1), 1)
    rows = [
        {
            "head": head,
            "group": head // size,
            "weight": weight,
            "width": 100 * weight / most if most > 0 else 0.0,
            "discarded": _at(trial.max_discarded_per_head, head),
            "envelope": _at(trial.envelope_per_head, head),
        }
        for head, weight in enumerate(trial.head_weights)
    ]
    return sorted(rows, key=lambda row: -row["weight"])


@dataclass(frozen=True)
class _AuditView:
    """An audit, and where its heads' intervals lie on an axis from 0 to ``end``."""

    audit: AuditResult
    end: float
    limit: float
    heads: tuple[tuple[int, float, float, bool, float, float], ...]  # head, mean, upper, passed, left and right in %

    @classmethod
    def of(cls, audit: AuditResult) -> _AuditView:
        end = min(1.0, 1.1 * max([audit.limit, *audit.upper, *audit.eta_hat])) or 1.0
        heads = tuple(
            (head, mean, upper, passed, 100 * min(mean / end, 1.0), 100 * min(upper / end, 1.0))
            for head, (mean, upper, passed) in enumerate(zip(audit.eta_hat, audit.upper, audit.passed, strict=True))
        )
        return cls(audit, end, 100 * min(audit.limit / end, 1.0), heads)


@dataclass(frozen=True)
class _DecodeView:
    """The decode monitor as bars: left and width in percent, height in pixels of :attr:`height`."""

    seen: DecodeMonitor
    largest: float
    largest_at: int | None
    height: int
    threshold: float
    bars: tuple[tuple[float, float, float, bool, str], ...]

    @classmethod
    def of(cls, seen: DecodeMonitor) -> _DecodeView:
        values = seen.max_per_token
        height = 96
        largest = max(values, default=0.0)
        end = max(largest, seen.threshold, 1e-9) * 1.1
        step = max(1, -(-len(values) // _BARS))
        bars = []
        for start in range(0, len(values), step):
            part = values[start : start + step]
            token = f"token {start + 1}" if len(part) == 1 else f"tokens {start + 1} to {start + len(part)}, largest"
            left, width = 100 * start / len(values), 100 * len(part) / len(values)
            top = max(part)
            bars.append((left, width, height * top / end, top > seen.threshold, f"{token}: {number(top)}"))
        at = values.index(largest) + 1 if values else None
        return cls(seen, largest, at, height, height * (1 - seen.threshold / end), tuple(bars))


def number(value: float | int | None) -> str:
    """A number of a record for people: three digits, more only for what would read as 0."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 10 or value == 0:
        return f"{value:,.1f}".removesuffix(".0")
    return f"{value:.1g}" if abs(value) < 0.0005 else f"{value:.3f}"


def _opacity(mass: float, most: float) -> float:
    return _FAINTEST + (_FULL - _FAINTEST) * mass / most if most > 0 else _FAINTEST


def _at(values: Sequence[float], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _cap(record: AuditRecord) -> float | None:
    """The cap of all proposal rows; None where rows have caps of their own."""
    cap = record.config.get("eps_row")
    return float(cap) if isinstance(cap, (int, float)) else None


def _settings(config: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", given) for inner, given in _settings(value))
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _clean(value: Any) -> Any:
    """What Jinja writes out: text without control characters, numbers as they are, markup of the template itself."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("entroprefill_rag.report"),
        autoescape=True,
        finalize=_clean,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = number
    return made
