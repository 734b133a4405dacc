"""What observers lose at one layer under a fixed removed set, each row and each probe read at most once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.audit import Audit
from entroprefill_rag.rule.masses import RowMasses, discarded
from entroprefill_rag.rule.observers import AuditPlan

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

RowReader = Callable[[Tensor, bool], RowMasses]
"""Reads one layer: (row positions ``[R]``, whether the mean row per token is wanted too) -> masses."""


@runtime_checkable
class ReadsProbes(Protocol):
    """A row reader that can also run probes up to its layer."""

    def probes(self, places: Tensor) -> Tensor:
        """Masses ``[H_Q, B, k]`` of the probes at these places of the bank ``[B]``: the mean over each one's rows."""


class Remembered:
    """Losses ``[H_Q, U]`` at places known beforehand, each fetched when it is first asked for.

    Args:
        places: ``[U]``, ascending, without repeats.
        heads: ``H_Q``.
        fetch: losses ``[H_Q, u]`` at some of the places.

    Attributes:
        finite: whether everything fetched was a number.
    """

    def __init__(self, places: Positions, heads: int, fetch: Callable[[Positions], Floats]) -> None:
        self._places, self._fetch = places, fetch
        self._values = np.zeros((heads, len(places)))
        self._seen = np.zeros(len(places), dtype=np.bool_)
        self.finite = True

    def know(self, which: NDArray[np.bool_], values: Floats | float) -> None:
        """Losses that need no reading: at the places that the mask ``which`` names, ``[H_Q, count]``."""
        self._values[:, which] = values
        self._seen |= which

    def at(self, wanted: Positions) -> Floats:
        """Losses ``[H_Q, m]`` at ``wanted``, in that order; at most 1: float32 masses may sum to a little more."""
        place = np.searchsorted(self._places, wanted)
        missing = np.unique(place[~self._seen[place]])
        if missing.size:
            fetched = self._fetch(self._places[missing])
            self.finite &= bool(np.isfinite(fetched).all())
            self._values[:, missing] = fetched
            self._seen[missing] = True
        return np.minimum(self._values[:, place], 1.0)


class LayerLosses:
    """The losses that an audit may ask for at one layer.

    Rows read once are remembered over all distributions, and so are probes. Nothing is read before it is asked for: an
    audit that stops early saves the reading.

    Args:
        audit: what may be looked at.
        read: reads rows of this layer; for probes it must be a :class:`ReadsProbes` too.
        removed: chunks of the removed set.
        gone: ``[T]`` positions of their tokens: such a row loses nothing.
        known: ``[W_p]`` ascending consecutive positions that have been read at this layer (the proposal rows).
        lost: ``[H_Q, W_p]`` what they lose.
        caps: ``[W_p]`` the most that the caps let them lose.
    """

    def __init__(
        self,
        audit: Audit,
        read: RowReader,
        removed: tuple[int, ...],
        gone: Positions,
        *,
        known: Positions,
        lost: Floats,
        caps: Floats,
    ) -> None:
        self._audit = audit

        def of_rows(positions: Positions) -> Floats:
            return discarded(read(torch.from_numpy(positions), False).chunks, removed).numpy()

        def of_probes(places: Positions) -> Floats:
            reader: object = read
            if not isinstance(reader, ReadsProbes):
                raise ConfigError(
                    "the audit asks for probe queries, but whoever drives this model reads rows only; prune through "
                    "a LocalBackend, or leave ProbeQueries out of the observers"
                )
            return discarded(reader.probes(torch.from_numpy(places)), removed).numpy()

        heads = len(lost)
        self._rows = Remembered(audit.looked, heads, of_rows)
        self._probes = Remembered(audit.probes, heads, of_probes)
        self._allowed = np.ones(len(audit.looked))
        mine = np.isin(audit.looked, known)
        place = audit.looked[mine] - (known[0] if len(known) else 0)
        self._rows.know(mine, lost[:, place])
        self._allowed[mine] = caps[place]
        removed_rows = np.isin(audit.looked, gone)
        self._rows.know(removed_rows, 0.0)
        self._allowed[removed_rows] = 0.0

    @property
    def finite(self) -> bool:
        """Whether every loss read so far was a number."""
        return self._rows.finite and self._probes.finite

    def read_rows(self) -> None:
        """Read every row of the audit in one call; probes are left for later."""
        self._rows.at(self._audit.looked)

    def of(self, plan: AuditPlan, part: slice = slice(None)) -> Floats:
        """Losses ``[H_Q, m]`` of a plan's observers in the order drawn, or of a part of them."""
        return (self._probes if plan.probes else self._rows).at(plan.rows.numpy()[part])

    def allowed(self, plan: AuditPlan) -> Floats:
        """``[1, m]`` the most that the caps let each observer lose; 1 where no cap speaks of it."""
        if plan.probes:
            return np.ones((1, plan.m))
        return np.asarray(self._allowed[None, np.searchsorted(self._audit.looked, plan.rows.numpy())])
