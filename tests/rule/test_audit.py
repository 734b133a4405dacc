"""What an audit looks at, and what it makes of it."""

import sys

import numpy as np
import pytest
from scipy.stats import binom
from synthetic import auditing

from entroprefill_rag.config import ProbeQueries, PromptRows, SuffixRows, WeightedRows
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.rule.audit import AUTO_LEAST, AUTO_MOST, observers_needed, plan_audit, significant
from entroprefill_rag.rule.bounds import bounded_mean, recheck, smallest_m
from entroprefill_rag.rule.concentration import kl_passes


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


def test_the_variance_that_empirical_bernstein_used_is_recorded():
    audit = plan(auditing(bound="empirical_bernstein", observers=(PromptRows(),)), heads=3)
    losses = np.random.default_rng(0).beta(1, 30, (3, audit.m_a))
    result = audit.decide(audit.plans[0], losses, tokens_removed=0, allowed=np.ones((1, audit.m_a)))
    assert result.variance == significant(((losses - losses.mean(1, keepdims=True)) ** 2).sum(1) / (audit.m_a - 1))
    assert audit.judge(
        audit.plans[0], np.zeros((3, len(audit.looked))), tokens_removed=0, allowed=np.ones(len(audit.looked))
    ).variance == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("bound", ["hoeffding", "kl", "betting"])
def test_other_bounds_record_no_variance(bound):
    audit = plan(auditing(bound=bound, observers=(PromptRows(),)), heads=1)
    losses = np.zeros((1, audit.m_a))
    assert audit.decide(audit.plans[0], losses, tokens_removed=0, allowed=losses).variance is None


def test_the_setup_names_the_decay_of_weighted_rows_even_where_drawn_rows_carry_no_weights():
    for method in ("enumerate", "sample"):
        setup = plan(auditing(observers=(WeightedRows(decay=0.6), SuffixRows()), method=method)).setup()
        assert [info.decay for info in setup.observers] == [0.6, None]


def test_rows_come_before_probes_and_exact_means_before_draws():
    bank = ProbeQueries(queries=tuple(f"q{i}" for i in range(500)))
    audit = plan(auditing(observers=(bank, PromptRows(), SuffixRows())))
    assert [p.kind for p in audit.in_turn] == ["suffix_rows", "prompt_rows", "probe_queries"]
    assert [p.kind for p in audit.plans] == ["probe_queries", "prompt_rows", "suffix_rows"]
    assert set(audit.probes) == set(audit.plans[0].rows.tolist())
    assert audit.looked.min() >= 10, "places in the bank are no positions"


# -- looking at the draws in batches -------------------------------------------------------------------------------


def sequential(**settings):
    return auditing(observers=(PromptRows(),), sequential=True, **settings)


def looking(losses, at):
    """What is looked at, from losses in the order drawn; the slices go to ``at``."""

    def look(part):
        at.append(part)
        return losses[:, part]

    return look


def test_auto_announces_four_times_the_smallest_number_where_the_audit_may_stop():
    settings = sequential(eps_audit=0.1)
    least = smallest_m("betting", 0.1, settings.delta / (8 * 9))
    assert observers_needed(settings, layers=8, heads=9) == 4 * least
    assert plan(settings).m_a == 4 * least


def test_announced_draws_are_those_of_the_audit_that_looks_at_all():
    fixed, stopping = plan(auditing(observers=(PromptRows(),), m_a=300)), plan(sequential(m_a=300))
    assert stopping.setup().sequential
    assert not fixed.setup().sequential
    assert stopping.setup().observers == fixed.setup().observers


def test_a_clear_pass_ends_early_and_its_record_says_so():
    audit = plan(sequential(m_a=300), heads=9)
    losses, at = np.random.default_rng(0).beta(1, 60, (9, 300)), []
    result = audit.follow(audit.plans[0], looking(losses, at), tokens_removed=500)
    assert (result.ended, result.announced, result.accepted) == ("passed", 300, True)
    assert result.m == at[-1].stop < 100
    assert [part.start for part in at] == [0, *(part.stop for part in at[:-1])]
    assert result.retained_share == pytest.approx(1 - 500 / 2024)
    # Everything recorded is what a look at the first m draws gives, and the verdict follows from it.
    seen = bounded_mean(losses[:, : result.m], result.limit, result.level, "betting")
    assert result.log_wealth == significant(seen.log_wealth)
    assert result.eta_hat == significant(losses[:, : result.m].mean(axis=1))
    numbers = {"eps": result.limit, "level": result.level, "m": result.m, "eta_hat": result.eta_hat}
    for leeway in (-1e-8, 1e-8):
        assert recheck(
            "betting", **numbers, upper=result.upper, log_wealth=result.log_wealth, leeway=leeway
        ).tolist() == list(result.passed)


def test_one_hopeless_head_ends_it_early():
    audit = plan(sequential(m_a=300), heads=9)
    losses, at = np.zeros((9, 300)), []
    losses[4] = 0.5
    result = audit.follow(audit.plans[0], looking(losses, at), tokens_removed=0)
    assert (result.ended, result.accepted) == ("hopeless", False)
    assert result.m == at[-1].stop < 300
    assert result.passed[4] is False


def test_a_close_call_looks_at_every_draw():
    audit = plan(sequential(m_a=300), heads=1)
    result = audit.follow(audit.plans[0], looking(np.full((1, 300), 0.14), []), tokens_removed=0)
    assert (result.ended, result.m, result.accepted) == ("exhausted", 300, False)


def test_an_enumerated_distribution_cannot_be_cut_short():
    audit = plan(auditing(sequential=True))
    with pytest.raises(ConfigError, match="exact mean"):
        audit.follow(audit.plans[0], looking(np.zeros((9, 24)), []), tokens_removed=0)


def test_observers_used_on_synthetic_losses(capsys):
    """Cost of the sequential audit against the fixed one: 9 heads, 8 layers, losses that vary as masses do."""
    used = {}
    for mean in (0.02, 0.05, 0.075, 0.3):
        rng, shares = np.random.default_rng(7), []
        audit = plan(sequential())
        fixed = observers_needed(auditing(), layers=8, heads=9)
        for _ in range(20):
            losses = rng.beta(10 * mean, 10 * (1 - mean), (9, audit.m_a))
            shares.append(audit.follow(audit.plans[0], looking(losses, []), tokens_removed=0).m / fixed)
        used[mean] = float(np.mean(shares))
    told = ", ".join(f"{share:.2f} at a mean of {mean:g}" for mean, share in used.items())
    with capsys.disabled():
        sys.stdout.write(f"\nobservers looked at, of those the fixed audit draws: {told}\n")
    assert used[0.02] < 0.85, "a clear pass is cheaper than the fixed audit"
    assert max(used.values()) < 2.0, "the worst costs at most what is announced"


BOUNDARY, LEVEL, RUNS, DRAWS = 0.25, 0.05, 1000, 3000


def boundary_draws():
    """Losses ``[1, DRAWS]`` of each run by the audit's own draws; the support's mean is the limit itself, J = H = 1."""
    lost = np.zeros(2024)
    lost[: 2024 // 4] = 1.0
    assert lost.mean() == BOUNDARY
    settings = sequential(eps_audit=BOUNDARY, delta=LEVEL, m_a=DRAWS, method="sample")
    for seed in range(RUNS):
        audit = plan(settings, layers=1, heads=1, seed=seed)
        support = np.concatenate([np.arange(10, 2010), np.arange(2020, 2044)])
        yield audit, lost[np.searchsorted(support, audit.plans[0].rows.numpy())][None]


def too_many(accepted):
    """Whether so many acceptances at the boundary refute a probability of at most ``LEVEL`` (exact binomial tail)."""
    return binom.sf(accepted - 1, RUNS, LEVEL) < 1e-4


@pytest.mark.slow
def test_stopping_at_will_spends_no_more_than_delta_and_peeking_at_a_fixed_bound_does():
    kept, means = 0, np.empty((RUNS, DRAWS))
    for run, (audit, losses) in enumerate(boundary_draws()):
        kept += audit.follow(audit.plans[0], looking(losses, []), tokens_removed=0).accepted
        means[run] = losses[0].cumsum() / np.arange(1, DRAWS + 1)
    looks = [kl_passes(means[:, m - 1], m, BOUNDARY, LEVEL) for m in range(10, DRAWS + 1, 10)]
    peeked = int(np.any(looks, axis=0).sum())
    assert not too_many(kept), f"stopping at will accepted {kept} of {RUNS}"
    assert kept > 0, "a test at the boundary that never accepts would not notice a bound that is too small"
    assert not too_many(looks[-1].sum()), "one look at the end is valid"
    assert too_many(peeked), f"peeking accepted {peeked} of {RUNS}"
