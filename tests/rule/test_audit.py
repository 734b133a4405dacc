"""What an audit looks at, and what it makes of it."""

import numpy as np
import pytest
from synthetic import auditing

from entroprefill_rag.config import PromptRows, SuffixRows, WeightedRows
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.audit import AUTO_LEAST, AUTO_MOST, observers_needed, plan_audit, significant
from entroprefill_rag.rule.bounds import smallest_m


def plan(settings, *, suffix=24, layers=8, heads=9, seed=5, block=2000):
    return plan_audit(
        settings,
        document_block=(10, 10 + block),
        suffix=(20 + block, 20 + block + suffix),
        layers=layers,
        heads=heads,
        seed=seed,
        prompt_hash="p",
    )


def test_numbers_keep_nine_digits():
    assert significant([1 / 3, 1e-12 / 3, 0.0, 1.0]) == (0.333333333, 3.33333333e-13, 0.0, 1.0)


@pytest.mark.parametrize("bound", ["hoeffding", "kl", "empirical_bernstein", "betting"])
def test_auto_takes_twice_the_smallest_number_that_can_pass(bound):
    settings = auditing(bound=bound, eps_audit=0.1)
    least = smallest_m(bound, 0.1, settings.delta / (8 * 9))
    assert observers_needed(settings, layers=8, heads=9) == max(AUTO_LEAST, 2 * least)


def test_auto_takes_at_least_a_fair_number_of_observers():
    assert observers_needed(auditing(eps_audit=0.6, delta=0.5), layers=1, heads=1) == AUTO_LEAST


def test_an_audit_that_can_never_pass_names_the_smallest_number_that_could():
    settings = auditing(bound="hoeffding", eps_audit=0.1, delta=0.05, m_a=300)
    with pytest.raises(ConfigError, match="m_a >= 364"):
        observers_needed(settings, layers=8, heads=9)
    assert observers_needed(settings.model_copy(update={"m_a": 364}), layers=8, heads=9) == 364


def test_auto_gives_up_beyond_its_limit_and_names_the_number():
    settings = auditing(bound="hoeffding", eps_audit=0.01)
    with pytest.raises(ConfigError, match=r"m_a >= \d{5}.*limited to 4096 by auto"):
        observers_needed(settings, layers=8, heads=9)
    assert AUTO_MOST == 4096


def test_a_union_over_layers_only_needs_fewer_observers():
    paper = auditing(bound="hoeffding", eps_audit=0.1, m_a=254)
    with pytest.raises(ConfigError, match="m_a >= 364"):
        observers_needed(paper, layers=8, heads=9)
    assert observers_needed(paper.model_copy(update={"union": "layers"}), layers=8, heads=9) == 254


def test_a_short_suffix_is_enumerated_and_the_document_block_sampled_by_default():
    audit = plan(auditing())
    suffix, prompt = audit.plans
    assert (suffix.method, suffix.delta, suffix.m) == ("enumerate", None, 24)
    assert (prompt.method, prompt.delta, prompt.m) == ("sample", 0.05, audit.m_a)
    assert audit.level(suffix) is None
    assert audit.level(prompt) == pytest.approx(0.05 / 72)


def test_sampled_distributions_share_delta_and_the_number_drawn_allows_for_it():
    audit = plan(auditing(), suffix=500)
    assert [p.method for p in audit.plans] == ["sample", "sample"]
    assert [p.delta for p in audit.plans] == [0.025, 0.025]
    assert audit.m_a >= 2 * smallest_m("betting", 0.15, 0.025 / 72)


def test_where_sharing_delta_makes_everything_enumerable_nothing_is_sampled():
    settings = auditing(observers=(SuffixRows(), WeightedRows()))
    alone = observers_needed(settings, layers=8, heads=9, sampled=1)
    shared = observers_needed(settings, layers=8, heads=9, sampled=2)
    assert alone < shared
    audit = plan(settings, suffix=shared)
    assert [p.method for p in audit.plans] == ["enumerate", "enumerate"]


def test_a_fixed_number_too_small_for_the_shared_delta_is_refused():
    settings = auditing(bound="hoeffding", eps_audit=0.1, m_a=364)
    assert plan(settings, suffix=24).plans[1].m == 364
    with pytest.raises(ConfigError, match="m_a >= "):
        plan(settings, suffix=500)


def test_enumeration_needs_no_number_of_observers():
    audit = plan(auditing(method="enumerate", bound="hoeffding", eps_audit=0.001, m_a=2))
    assert [p.method for p in audit.plans] == ["enumerate", "enumerate"]
    assert audit.plans[1].m == 2024


def test_the_plan_depends_on_the_seed_only():
    one, same, other = plan(auditing()), plan(auditing()), plan(auditing(), seed=6)
    assert one.setup() == same.setup()
    assert one.setup().observers[1].rows != other.setup().observers[1].rows


def test_looked_holds_every_position_once():
    audit = plan(auditing())
    rows = {int(row) for p in audit.plans for row in p.rows}
    assert audit.looked.tolist() == sorted(rows)


def test_losses_come_in_the_order_drawn():
    audit = plan(auditing(), heads=1)
    lost = audit.looked[None] / 10_000.0
    for p in audit.plans:
        np.testing.assert_allclose(audit.losses(p, lost)[0], p.rows.numpy() / 10_000.0)


def test_an_enumerated_mean_is_exact():
    audit = plan(auditing(observers=(WeightedRows(decay=0.5),)), suffix=3, heads=2)
    lost = np.array([[0.0, 0.0, 0.1], [0.4, 0.0, 0.0]])
    result = audit.judge(audit.plans[0], lost, tokens_removed=0, allowed=np.ones(3))
    assert result.eta_hat == pytest.approx((0.1 * 4 / 7, 0.4 / 7))
    assert result.bound == "exact"
    assert result.level is None
    assert result.accepted
    assert result.retained_share is None


def test_one_head_above_the_limit_fails_the_audit():
    audit = plan(auditing(), heads=2)
    lost = np.zeros((2, len(audit.looked)))
    assert all(audit.judge(p, lost, tokens_removed=0, allowed=lost[0]).accepted for p in audit.plans)
    lost[1] = 0.2
    for p in audit.plans:
        result = audit.judge(p, lost, tokens_removed=0, allowed=np.ones(lost.shape[1]))
        assert result.passed == (True, False)
        assert not result.accepted


def test_the_share_of_rows_retained_is_told_for_prompt_rows():
    audit = plan(auditing(observers=(PromptRows(),)), suffix=40, block=1960)
    lost = np.zeros((9, len(audit.looked)))
    result = audit.judge(audit.plans[0], lost, tokens_removed=500, allowed=np.ones(lost.shape[1]))
    assert result.retained_share == pytest.approx(0.75)


@pytest.mark.parametrize(("allowed", "implied"), [(0.1, True), (0.2, False)])
def test_caps_that_cover_an_enumerated_support_are_seen_to_imply_the_statement(allowed, implied):
    audit = plan(auditing(observers=(SuffixRows(),)))
    lost = np.zeros((9, 24))
    result = audit.judge(audit.plans[0], lost, tokens_removed=0, allowed=np.full(24, allowed))
    assert result.caps_imply is implied
