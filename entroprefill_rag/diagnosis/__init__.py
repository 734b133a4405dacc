"""Is the output still the same? The full and the pruned run of a request side by side, and the conditional bound.

    >>> from entroprefill_rag.diagnosis import diagnose, measure_assumptions
    >>> found = diagnose(backend, request)                        # doctest: +SKIP
    >>> found.next_token.divergence, found.fixed_rows_hold        # doctest: +SKIP
    >>> found.rows()     # one mapping per layer, for tables      # doctest: +SKIP
    >>> measured = measure_assumptions(backend, requests)         # doctest: +SKIP
    >>> conditional_bound(measured.above(layer), measured.eta)    # doctest: +SKIP

For study tables, per layer above the pruned one, in :meth:`Diagnosis.rows`: ``drift``, ``lipschitz``, ``token_map``,
``eta`` (do the assumptions hold); ``bound / distance`` as ``ratio``, ``ratio_token``, and true change / fixed-row bound
as ``fixed_tightest``, ``fixed_median``, ``fixed_diameter_tightest``, ``fixed_diameter_median`` (how tight is it).
"""

from entroprefill_rag.diagnosis.assumptions import measure_assumptions
from entroprefill_rag.diagnosis.diagnose import diagnose
from entroprefill_rag.diagnosis.results import (
    Diagnosis,
    FixedRows,
    LayerDiagnosis,
    MeasuredAssumptions,
    MeasuredLayer,
    NextToken,
)

__all__ = [
    "Diagnosis",
    "FixedRows",
    "LayerDiagnosis",
    "MeasuredAssumptions",
    "MeasuredLayer",
    "NextToken",
    "diagnose",
    "measure_assumptions",
]
