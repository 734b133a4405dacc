"""What a certificate says, what it takes for granted, and what it does not say."""

from __future__ import annotations

from entroprefill_rag.certificate.losses import MEANINGS
from entroprefill_rag.certificate.result import Claim, LossName

ASSUMES = (
    "The requests are independent draws of one workload, and later requests are drawn from the same one.",
    "Nothing that was decided before (grid, order, base, profile, alpha, delta) came from these requests.",
    "The model with its weights, the profile, the prompt's template and greedy decoding stay as they were.",
)
NOT_CLAIMED = (
    "anything about a single request: the loss of one may be 1",
    "anything where the workload drifts, or of a part of it (a language, a kind of question) by itself",
    "a probability given that something was certified",
    "more than one certificate from the same requests: with another grid, loss or alpha, each spends delta again",
    "a speed-up: work is counted in tokens x layers, not in seconds",
)


def claim(loss: LossName, *, alpha: float, delta: float, n: int, certified: int, chosen: int | None) -> Claim:
    """The claim of a certificate.

    Args:
        loss: what counts as lost.
        alpha: level of the expected loss.
        delta: probability of error.
        n: requests measured.
        certified: how many configurations, counted from the first.
        chosen: place of the chosen one, counted from 0; None where none is certified.
    """
    if chosen is None:
        return Claim(
            not_claimed=("any expected loss: not even the first configuration could be certified", *NOT_CLAIMED)
        )
    which = "configuration 1" if certified == 1 else f"each of the configurations 1 to {certified}"
    return Claim(
        probabilistic=(
            f"With probability at least {1 - delta:g} over the draw of the {n} requests (and the audits' draws), the "
            f"expected loss of {which} is below {alpha:g}. The loss {loss}: {MEANINGS[loss]}; 0 where a request is "
            f"answered in full. Chosen: configuration {chosen + 1}."
        ),
        assumes=ASSUMES,
        not_claimed=NOT_CLAIMED,
    )
