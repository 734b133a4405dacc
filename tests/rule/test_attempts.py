"""Several attempts at one prompt: what retrying does to delta, and what sharing it does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from entroprefill_rag.config import AuditConfig, PromptRows
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.ledger import ReuseLedger
from entroprefill_rag.rule.attempts import delta_of_attempt
from entroprefill_rag.rule.audit import plan_audit
from entroprefill_rag.rule.bounds import bounded_mean

DELTA, EPS, RETRIES = 0.05, 0.5, 20


@given(delta=st.floats(1e-6, 0.999), attempts=st.integers(1, 300))
def test_the_shares_of_any_number_of_attempts_stay_below_delta(delta, attempts):
    shares = [delta_of_attempt(delta, r) for r in range(1, attempts + 1)]
    assert shares == sorted(shares, reverse=True)
    # A telescope: 1/(r(r+1)) = 1/r - 1/(r+1).
    assert sum(shares) == pytest.approx(delta * attempts / (attempts + 1))
    assert sum(shares) < delta


@pytest.mark.parametrize(("delta", "attempt"), [(0.0, 1), (1.0, 1), (0.1, 0), (0.1, -3)])
def test_a_delta_or_an_attempt_that_is_none_is_refused(delta, attempt):
    with pytest.raises(ConfigError, match="counted from 1"):
        delta_of_attempt(delta, attempt)


def false_accept(bound, level, m):
    """Exact probability that one head whose observers lose everything with probability EPS is accepted."""
    counts = np.arange(m + 1)
    losses = (np.arange(m) < counts[:, None]).astype(float)
    return float(binom.pmf(counts, m, EPS) @ bounded_mean(losses, EPS, level, bound).passed)


@pytest.mark.parametrize("bound", ["hoeffding", "kl"])
@pytest.mark.parametrize("m", [100, 150, 400])
def test_twenty_retries_at_one_delta_err_far_more_often_and_shared_ones_do_not(bound, m):
    each = [false_accept(bound, DELTA, m)] * RETRIES
    shared = [false_accept(bound, delta_of_attempt(DELTA, r), m) for r in range(1, RETRIES + 1)]
    assert each[0] <= DELTA
    together, shared_together = (1 - np.prod(1 - np.array(p)) for p in (each, shared))
    assert together > 2 * DELTA
    assert shared_together < DELTA / 2


@pytest.mark.parametrize(("attempts", "holds"), [("each", False), ("all", True)])
def test_retrying_the_default_audit_until_it_passes(attempts, holds):
    # 1000 rows of the prompt, EPS of which lose everything: the statement is on the edge of false.
    settings = AuditConfig(observers=(PromptRows(),), eps_audit=EPS, delta=DELTA, m_a=100)
    lost = np.random.default_rng(1).permutation(np.arange(1000) < 1000 * EPS).astype(float)
    ledger, seeds = ReuseLedger(), iter(range(10**6))
    prompts, wrong = 40, 0
    for prompt in range(prompts):
        for _ in range(RETRIES):
            seed = next(seeds)
            grant = ledger.reserve(str(prompt), "c", seed, fresh=True)
            delta = delta_of_attempt(DELTA, grant.attempt) if attempts == "all" else DELTA
            audit = plan_audit(
                settings.model_copy(update={"delta": delta}),
                document_block=(0, 990),
                suffix=(990, 1000),
                layers=1,
                heads=1,
                seed=seed,
                prompt_hash=str(prompt),
            )
            grant.spend()
            [plan] = audit.plans
            result = audit.judge(plan, lost[None, audit.looked], tokens_removed=0, allowed=np.ones(len(audit.looked)))
            if result.accepted:
                wrong += 1
                break
    # Probability of as many wrong prompts as this, if delta held for all retries at a prompt together.
    tail = float(binom.sf(wrong - 1, prompts, DELTA))
    assert (tail > 0.01) == holds, (wrong, tail)
    if not holds:
        assert tail < 1e-6
