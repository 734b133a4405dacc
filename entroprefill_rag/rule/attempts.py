"""What an attempt at a prompt may spend when several attempts share one delta (correction 1)."""

from __future__ import annotations

from entroprefill_rag.errors import ConfigError


def delta_of_attempt(delta: float, attempt: int) -> float:
    """The share ``delta / (r (r + 1))`` of the r-th attempt; over all ``r`` the shares sum to ``delta``.

    Retrying until an audit passes, at the same delta each time, accepts falsely far more often than delta. With these
    shares the union bound covers all attempts together, however many there will be.

    Args:
        delta: for all attempts together.
        attempt: ``r``, counted from 1.

    Raises:
        ConfigError: ``delta`` outside (0, 1), or an attempt below 1.
    """
    if not 0.0 < delta < 1.0 or attempt < 1:
        raise ConfigError(f"need delta in (0, 1) and an attempt counted from 1, got {delta} and {attempt}")
    return delta / (attempt * (attempt + 1))
