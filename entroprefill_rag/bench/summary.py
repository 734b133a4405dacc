"""From rows to the numbers of the report, as JSON data: all that a page shows is in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from entroprefill_rag.bench.rows import FORMAT, PARTS, Row
from entroprefill_rag.bench.session import digest_of
from entroprefill_rag.bench.statistics import (
    LEAST_REQUESTS,
    Chance,
    Estimate,
    Removed,
    against_chance,
    estimate,
    ratio,
)
from entroprefill_rag.errors import RecordError

Data = dict[str, Any]
QUALITY = ("found", "f1", "need_met")
MEANS = (
    *QUALITY,
    *("kept_share", "same_text", "same_first", "kl", "ttft", "total", "prompt_tokens", "generated_tokens"),
    *("token_layers", "kv_bytes", "peak_bytes"),
)
BESIDE = "embedder"


def summarise(rows: Sequence[Row], run: Mapping[str, Any]) -> Data:
    """The report's numbers.

    Args:
        rows: of one stamp.
        run: what the rows do not say (`Store.run`).

    Raises:
        RecordError: there is no row.
    """
    if not rows:
        raise RecordError("there is no row to report; run `entroprefill bench --out DIR` first")
    told: Mapping[str, Mapping[str, str]] = run.get("methods", {})
    by_method: dict[str, list[Row]] = {name: [] for name in told}
    for row in rows:
        # Of a method whose settings have changed since, the old rows say nothing.
        if row.settings == told.get(row.method, {}).get("settings", row.settings):
            by_method.setdefault(row.method, []).append(row)
    full, beside = (_answers(by_method.get(name, ())) for name in ("full", BESIDE))
    sets = sorted({row.set for row in rows})
    return {
        "format": FORMAT,
        "command": run.get("command", ""),
        "stamp": rows[0].stamp,
        "stamp_digest": digest_of(rows[0].stamp),
        "complete": bool(run.get("complete", False)),
        "notes": list(run.get("notes", ())),
        "not_run": list(run.get("not_run", ())),
        "questions": {name: len({row.question for row in rows if row.set == name}) for name in sets},
        "answerable": len({(row.set, row.question) for row in rows if row.answerable}),
        "methods": [
            {
                "name": name,
                "what": told.get(name, {}).get("what", ""),
                "origin": told.get(name, {}).get("origin", ""),
                **_method(mine, full),
                "beside": _beside(mine, beside),
            }
            for name, mine in by_method.items()
            if mine
        ],
        "sets": {
            name: {method: _of_set(mine, name, beside) for method, mine in by_method.items() if mine} for name in sets
        },
    }


def _method(rows: Sequence[Row], full: Mapping[tuple[str, str], Row]) -> Data:
    able = [row for row in rows if row.status == "ok"]
    failures = Counter(row.message for row in rows if row.status == "failed")
    pairs = [(row, full[row.set, row.question]) for row in able if (row.set, row.question) in full]
    return {
        "n": len(able),
        "failed": sum(failures.values()),
        "failures": [{"message": message, "count": count} for message, count in failures.most_common()],
        "skipped": sum(row.status == "skipped" for row in rows),
        **{name: _mean(able, name) for name in MEANS},
        "declines": {
            "unanswerable": _mean([row for row in able if not row.answerable], "declines"),
            "answerable": _mean([row for row in able if row.answerable], "declines"),
        },
        "seconds": {part: _told(estimate([row.seconds.get(part, 0.0) for row in able])) for part in PARTS},
        "paired": {name: _difference(pairs, name) for name in ("found", "f1")},
        "speedup": _ratio(pairs, lambda row: row.ttft),
        "work": _ratio([(b, a) for a, b in pairs], lambda row: row.token_layers),
        "decision": _decision(able),
    }


def _answers(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """What did not fail, by question."""
    return {(row.set, row.question): row for row in rows if row.status == "ok"}


def _beside(rows: Sequence[Row], other: Mapping[tuple[str, str], Row]) -> Data | None:
    """Paired with the embedder's short prompt; None where that did not run."""
    pairs = [(row, other[key]) for key, row in _answers(rows).items() if key in other]
    if not pairs:
        return None
    return {
        **{name: _difference(pairs, name) for name in QUALITY},
        "speedup": _ratio(pairs, lambda row: row.ttft),
    }


def _of_set(rows: Sequence[Row], name: str, beside: Mapping[tuple[str, str], Row]) -> Data:
    mine = [row for row in rows if row.set == name]
    able = [row for row in mine if row.status == "ok"]
    return {
        "n": len(able),
        "failed": sum(row.status == "failed" for row in mine),
        **{quality: _mean(able, quality) for quality in QUALITY},
        "ttft": _mean(able, "ttft"),
        "beside": _beside(mine, beside),
    }


def _mean(rows: Iterable[Row], name: str) -> Data | None:
    return _told(estimate([float(v) for row in rows if (v := getattr(row, name)) is not None]))


def _difference(pairs: Sequence[tuple[Row, Row]], name: str) -> Data | None:
    both = [(getattr(a, name), getattr(b, name)) for a, b in pairs]
    return _told(estimate([float(a) - float(b) for a, b in both if a is not None and b is not None]))


def _ratio(pairs: Sequence[tuple[Row, Row]], value: Callable[[Row], float | None]) -> Data | None:
    """Geometric mean of the second's value over the first's."""
    both = [(value(a), value(b)) for a, b in pairs]
    known = [(float(a), float(b)) for a, b in both if a and b]
    return _told(ratio([b for _, b in known], [a for a, _ in known]))


def _decision(rows: Sequence[Row]) -> Data | None:
    """Acceptance, layers, reasons, and the test against chance, of methods that decide in mid-prefill."""
    decided = [row for row in rows if row.outcome is not None]
    if not decided:
        return None
    accepted = [row for row in decided if row.outcome == "pruned"]
    layers = Counter(row.layer for row in accepted if row.layer is not None)
    verdicts: Counter[str] = Counter()
    for row in decided:
        verdicts.update(row.verdicts)
    return {
        "accepted": _told(estimate([float(row.outcome == "pruned") for row in decided])),
        "outcomes": dict(Counter(str(row.outcome) for row in decided).most_common()),
        "layers": {str(layer): layers[layer] for layer in sorted(layers)},
        "reasons": dict(Counter(str(row.reason) for row in decided).most_common()),
        "verdicts": dict(verdicts.most_common()),
        "chance": {
            "all": _chance(accepted),
            "layers": {
                str(layer): _chance([row for row in accepted if row.layer == layer])
                for layer in sorted(layers)
                if layers[layer] >= LEAST_REQUESTS
            },
        },
    }


def _chance(rows: Sequence[Row]) -> Data | None:
    removals = [
        Removed(chunks=row.chunks, gold=row.gold, kept=row.kept, gold_kept=row.gold_kept)
        for row in rows
        if row.kept is not None and row.gold_kept is not None
    ]
    return _told(against_chance(removals))


def _told(value: Estimate | Chance | None) -> Data | None:
    """Four digits are more than is known."""
    if value is None:
        return None
    return {name: one if isinstance(one, int) else float(f"{one:.4g}") for name, one in asdict(value).items()}
