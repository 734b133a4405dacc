"""Query-observer distributions: which rows an audit looks at, fixed before the request's attention is seen.

An observer distribution [nu] is a finite set of prompt rows with weights (section 6), or a bank of other questions
("probes"), each a branch of its own over the same documents (correction 8). It is either read whole
(``enumerate``: the mean is exact and no confidence is spent) or looked at through independent draws (``sample``).
The draws come from a stream of their own, derived from the audit's seed, the prompt's hash and the kind of the
distribution (correction 1): no other randomness of a request touches it, and another prompt has other draws.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entroprefill_rag.config import Observer, ProbeQueries, WeightedRows
from entroprefill_rag.errors import ConfigError, RequestError

_STREAM = "entroprefill/audit-rows/1"


@dataclass(frozen=True)
class AuditPlan:
    """What one audit reads, whatever the attention turns out to be.

    Attributes:
        kind: the distribution's kind, as in ``AuditConfig.observers``.
        support: number of rows, or probes, the distribution can draw. An audit over a support of one row is a look
            at one token, which is not an audit (correction 3): the caller refuses it.
        method: whether the support is enumerated or sampled.
        rows: LongTensor ``[m]``, positions in the order drawn (they may repeat), or the whole support ascending. For
            probes these are places in the bank, not positions of the prompt.
        weights: float64 ``[m]``, summing to one: the distribution's weights where it is enumerated and not
            uniform. None where every row counts the same; so for draws, which already follow the distribution.
        delta: the share of the audit's delta that this distribution may spend; None where enumerated.
        prompt_rows: a row that is itself removed loses nothing.
        probes: observers are probes; what one loses is the mean over its own rows.
        decay: weight of a row relative to the row after it; weighted rows only.
    """

    kind: str
    support: int
    method: Literal["enumerate", "sample"]
    rows: Tensor
    weights: Tensor | None
    delta: float | None
    prompt_rows: bool
    probes: bool = False
    decay: float | None = None

    @property
    def m(self) -> int:
        """Number of observers looked at, at most."""
        return len(self.rows)


def support_of(
    observer: Observer, *, document_block: tuple[int, int], suffix: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    """The rows (or places in the bank of probes) that a distribution may draw, and their probabilities.

    Args:
        observer: the distribution.
        document_block: half-open range from the first chunk's start to the last chunk's end.
        suffix: half-open range of the query and the template's tail.

    Returns:
        Positions ``[support]``, ascending, and probabilities ``[support]``, or None where uniform.

    Raises:
        RequestError: the suffix is empty, or a range is not ascending or overlaps the other.
    """
    if not 0 <= document_block[0] <= document_block[1] <= suffix[0] < suffix[1]:
        raise RequestError(
            f"the document block {document_block} and the suffix {suffix} must be ascending half-open ranges, the "
            "suffix not empty and after the documents; take both from the prompt's layout"
        )
    if isinstance(observer, ProbeQueries):
        return np.arange(len(observer.queries), dtype=np.int64), None
    suffix_rows = np.arange(*suffix, dtype=np.int64)
    if observer.kind == "suffix_rows":
        return suffix_rows, None
    if isinstance(observer, WeightedRows):
        if observer.decay == 1.0:
            return suffix_rows, None
        weights = observer.decay ** np.arange(len(suffix_rows) - 1, -1, -1, dtype=np.float64)
        return suffix_rows, weights / weights.sum()
    return np.concatenate([np.arange(*document_block, dtype=np.int64), suffix_rows]), None


def audit_generator(seed: int, prompt_hash: str, kind: str) -> np.random.Generator:
    """The stream of one audit's draws.

    Args:
        seed: the audit's seed, not negative, of any size.
        prompt_hash: names the prompt (``PromptLayout.hash``).
        kind: the distribution's kind.

    Returns:
        A generator that depends on these three and on nothing else.
    """
    # One digest, so that no two triples can run together into the same entropy words.
    digest = hashlib.sha256(json.dumps([_STREAM, int(seed), prompt_hash, kind]).encode()).digest()
    return np.random.default_rng(np.random.SeedSequence(int.from_bytes(digest, "big")))


def plan_audits(
    observers: tuple[Observer, ...],
    *,
    document_block: tuple[int, int],
    suffix: tuple[int, int],
    m_a: int,
    delta: float,
    method: str,
    seed: int,
    prompt_hash: str,
) -> tuple[AuditPlan, ...]:
    """Fix everything an audit will look at (section 6).

    Draws are independent, with replacement, from each distribution. ``delta`` is split evenly over the sampled
    distributions only: an enumerated one makes no probabilistic statement.

    Args:
        observers: the distributions, all of which must pass.
        document_block: half-open range from the first chunk's start to the last chunk's end, delimiters included.
        suffix: half-open range of the query and the template's tail.
        m_a: observers drawn from each sampled distribution.
        delta: probability of accepting falsely, for all of them together.
        method: ``"enumerate"``, ``"sample"``, or ``"auto"``: enumerate a support no larger than ``m_a``.
        seed: the audit's seed.
        prompt_hash: names the prompt.

    Returns:
        One plan per distribution, in the order given.

    Raises:
        ConfigError: an unknown method, ``m_a`` below one, ``delta`` outside (0, 1), or a negative seed.
        RequestError: ranges that are no prompt (see :func:`support_of`).
    """
    if method not in ("auto", "enumerate", "sample"):
        raise ConfigError(f"audit method {method!r} is unknown; use 'auto', 'enumerate' or 'sample'")
    if m_a < 1:
        raise ConfigError(f"m_a must be at least 1, got {m_a}")
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"delta must lie in (0, 1), got {delta}")
    if seed < 0:
        raise ConfigError(f"the audit's seed must not be negative, got {seed}")

    supports = [support_of(observer, document_block=document_block, suffix=suffix) for observer in observers]
    sampled = [method == "sample" or (method == "auto" and len(rows) > m_a) for rows, _ in supports]
    share = delta / max(1, sum(sampled))

    plans = []
    for observer, (rows, probabilities), drawn in zip(observers, supports, sampled, strict=True):
        weights = None
        support = len(rows)
        if drawn:
            generator = audit_generator(seed, prompt_hash, observer.kind)
            rows = rows[generator.choice(support, size=m_a, p=probabilities)]
        elif probabilities is not None:
            weights = torch.from_numpy(probabilities)
        plans.append(
            AuditPlan(
                kind=observer.kind,
                support=support,
                method="sample" if drawn else "enumerate",
                rows=torch.from_numpy(rows),
                weights=weights,
                delta=share if drawn else None,
                prompt_rows=observer.kind == "prompt_rows",
                probes=isinstance(observer, ProbeQueries),
                decay=observer.decay if isinstance(observer, WeightedRows) else None,
            )
        )
    return tuple(plans)


def retained_share(plan: AuditPlan, removed_tokens: int) -> float | None:
    """Probability that a row of the distribution is retained, by which the mean loss per retained row is scaled.

    Args:
        plan: the audit.
        removed_tokens: tokens of the document block that the proposal removes.

    Returns:
        The share, or None where rows are never removed (suffix rows).
    """
    return 1.0 - removed_tokens / plan.support if plan.prompt_rows else None
