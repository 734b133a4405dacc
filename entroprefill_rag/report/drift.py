"""What a person is told where a generated token looked back at what was removed."""

from __future__ import annotations

from entroprefill_rag.record import DecodeMonitor

_DONE = {
    "none": 'nothing was done about it (on_drift="restart_full" answers again in full)',
    "stopped": "the answer ends there",
    "restarted_full": "it was answered again in full",
}


def drift_line(seen: DecodeMonitor) -> str | None:
    """One line, from the first token above the threshold on; None where there was none."""
    if seen.first_above is None or not seen.max_per_token:
        return None
    return f"EXCEEDED at token {seen.first_above + 1}: the answer looks back at what was dropped; {_DONE[seen.action]}"
