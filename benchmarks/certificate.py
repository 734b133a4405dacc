"""Does the certificate hold what it says: many workloads whose true expected loss is known, and what gets certified.

    python benchmarks/certificate.py

Each trial draws the losses of one set of requests under a grid of configurations, and asks each procedure how many
configurations it certifies. A trial is an error where one of them has a true expected loss above alpha. A valid
procedure errs in at most a share delta of the trials. Two invalid ones run beside it, to show that the test can fail.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from entroprefill_rag.certificate.pvalues import fixed_sequence, hoeffding_bentkus

Floats = NDArray[np.float64]

ABOVE = 1e-3  # how far above alpha a bad configuration's true expected loss lies


@dataclass(frozen=True)
class Workload:
    """A grid with known expected losses.

    Attributes:
        name: for tables.
        risks: expected loss of each configuration, in the order of testing.
        together: configurations lose on the same requests, else independently of each other.
        shares: losses are shares (0, a half, 1), else 0 or 1.
    """

    name: str
    risks: tuple[float, ...]
    together: bool
    shares: bool

    def totals(self, rng: np.random.Generator, trials: int, n: int) -> Floats:
        """Sums of the losses, ``[trials, configurations]``."""
        wide = 1 if self.together else len(self.risks)
        u = rng.random((trials, wide, n))
        found = np.empty((trials, len(self.risks)))
        for at, risk in enumerate(self.risks):
            mine = u[:, 0 if self.together else at]
            if self.shares:  # 1 with risk / 2, a half with risk: the mean is the risk
                found[:, at] = (0.5 * (mine < 1.5 * risk) + 0.5 * (mine < 0.5 * risk)).sum(axis=1)
            else:
                found[:, at] = (mine < risk).sum(axis=1)
        return found


def workloads(alpha: float) -> tuple[Workload, ...]:
    """Grids whose last configurations are just above alpha."""
    bad = alpha + ABOVE
    rising = (alpha / 10, alpha / 4, alpha / 2, bad, bad, 2 * alpha)
    return (
        Workload("all just above alpha, independent", (bad,) * 10, together=False, shares=False),
        Workload("all just above alpha, the same requests", (bad,) * 10, together=True, shares=False),
        Workload("safe, then just above alpha", rising, together=True, shares=False),
        Workload("safe, then just above alpha, shares", rising, together=True, shares=True),
    )


def in_sequence(totals: Floats, n: int, alpha: float, delta: float) -> NDArray[np.bool_]:
    """Ours: which configurations are certified, ``[trials, configurations]``."""
    ps = hoeffding_bentkus(totals, n, alpha)
    certified = np.array([fixed_sequence(list(row), delta) for row in ps])
    return np.asarray(np.arange(totals.shape[1]) < certified[:, None])


def each_alone(totals: Floats, n: int, alpha: float, delta: float) -> NDArray[np.bool_]:
    """Invalid: every configuration tested at the whole of delta, without an order."""
    return np.asarray(hoeffding_bentkus(totals, n, alpha) <= delta)


def plug_in(totals: Floats, n: int, alpha: float, delta: float) -> NDArray[np.bool_]:
    """Invalid: the mean that was seen is taken for the expected loss."""
    return np.asarray(totals / n <= alpha)


PROCEDURES: dict[str, Callable[[Floats, int, float, float], NDArray[np.bool_]]] = {
    "fixed sequence, Hoeffding-Bentkus": in_sequence,
    "each alone at delta (invalid)": each_alone,
    "mean below alpha (invalid)": plug_in,
}


def errors(workload: Workload, procedure: str, *, trials: int, n: int, alpha: float, delta: float, seed: int) -> int:
    """Trials in which a configuration with an expected loss above alpha was certified."""
    totals = workload.totals(np.random.default_rng(seed), trials, n)
    bad = np.array(workload.risks) > alpha
    return int((PROCEDURES[procedure](totals, n, alpha, delta) & bad).any(axis=1).sum())


def most_errors(trials: int, delta: float) -> int:
    """More errors than this have probability below one in a million where each trial errs with ``delta`` at most."""
    return int(binom.ppf(1 - 1e-6, trials, delta))


def main() -> None:
    """Print the share of errors of each procedure on each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20000)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--delta", type=float, default=0.05)
    given = parser.parse_args()
    most = most_errors(given.trials, given.delta)
    print(f"{given.trials} trials, {given.requests} requests, alpha {given.alpha:g}, delta {given.delta:g}")
    print(f"a valid procedure errs in at most {most} trials ({most / given.trials:.4f}), but for one chance in 1e6\n")
    print("| workload | " + " | ".join(PROCEDURES) + " |\n|---|" + "---|" * len(PROCEDURES))
    for workload in workloads(given.alpha):
        cells = [
            errors(
                workload,
                name,
                trials=given.trials,
                n=given.requests,
                alpha=given.alpha,
                delta=given.delta,
                seed=at,
            )
            for at, name in enumerate(PROCEDURES)
        ]
        print(f"| {workload.name} | " + " | ".join(f"{count / given.trials:.4f}" for count in cells) + " |")


if __name__ == "__main__":
    main()
