"""The exceedance bound of Clopper and Pearson; the other closed forms are tested with the bounds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from entroprefill_rag.rule.concentration import exceedance_upper


@pytest.mark.parametrize("level", [0.05, 1e-3])
@pytest.mark.parametrize("m", [1, 20, 137])
def test_the_exceedance_bound_covers_every_share_exactly(m: int, level: float) -> None:
    uppers = np.array([exceedance_upper(count, m, level) for count in range(m + 1)])
    for share in np.linspace(0.001, 0.999, 37):
        assert binom.pmf(np.arange(m + 1), m, share)[uppers < share].sum() <= level + 1e-12
    for count in range(m):
        assert binom.cdf(count, m, uppers[count]) == pytest.approx(level, rel=1e-6), "shorter would be wrong"


def test_no_exceedance_in_m_observers_bounds_the_share_by_a_root_of_the_level() -> None:
    assert exceedance_upper(0, 59, 0.05) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert exceedance_upper(59, 59, 0.05) == 1.0


@pytest.mark.parametrize(("exceeded", "m", "level"), [(-1, 5, 0.1), (6, 5, 0.1), (0, 0, 0.1), (0, 5, 0.0), (0, 5, 1.0)])
def test_counts_that_cannot_be_are_refused(exceeded: int, m: int, level: float) -> None:
    with pytest.raises(ValueError, match="cannot bound"):
        exceedance_upper(exceeded, m, level)
