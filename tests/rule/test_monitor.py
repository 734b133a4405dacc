"""Layer by layer: what is accepted, what is rejected and why, and in which order things are read."""

import time

import pytest
import torch
from synthetic import GROUPS, HEADS, Reader, attention, auditing, layout, pruning

from entroprefill_rag.config import ProbeQueries, PromptRows, SuffixRows, WeightedRows
from entroprefill_rag.errors import ConfigError
from entroprefill_rag.record import LayerTrial
from entroprefill_rag.rule.dual import dual_value
from entroprefill_rag.rule.monitor import VERDICTS, Monitor, jaccard_distance

GOOD = [0.01, 0.2, 0.01, 0.2, 0.02, 0.05]
OTHER = [0.2, 0.01, 0.2, 0.01, 0.05, 0.02]
SINKS = [0.002] * 6
TIGHT = [0.16] * 6


def monitor(prompt, layers=(3, 5, 7), seed=11, **config):
    return Monitor(pruning(**config), prompt, layers, HEADS, GROUPS, seed=seed)


def spoiled(prompt, chunk_mass, spoil):
    """Attention whose rows outside the proposal place ``spoil`` on the chunks instead."""
    unseen = range(prompt.suffix_span[0], prompt.suffix_span[0] + 6)
    return attention(prompt, chunk_mass, rows=dict.fromkeys(unseen, spoil))


@pytest.fixture
def prompt():
    return layout()


def test_a_layer_that_knows_what_it_looks_at_is_accepted(prompt):
    watch = monitor(prompt)
    decision = watch.observe(3, Reader(prompt, attention(prompt, GOOD, jitter=0.3)))
    assert decision.accepted
    assert decision.removed == (0, 2, 4)
    gone = {token for i in decision.removed for token in range(*prompt.chunk_spans[i])}
    assert decision.kept_tokens.dtype == torch.long
    assert decision.kept_tokens.tolist() == [token for token in range(prompt.n_tokens) if token not in gone]
    trial = watch.trials[0]
    assert trial.verdict == watch.reason()
    assert trial.verdict.code == "accepted"
    assert [audit.accepted for audit in trial.audits] == [True, True]
    assert trial.streak == 1


def test_kept_tokens_hold_everything_protected(prompt):
    decision = monitor(prompt).observe(3, Reader(prompt, attention(prompt, GOOD)))
    kept = set(decision.kept_tokens.tolist())
    assert {token for token, fixed in enumerate(prompt.protected) if fixed} <= kept


@pytest.mark.parametrize(
    ("config", "mass", "code"),
    [
        ({}, SINKS, "no_document_mass"),
        ({"mu_min": 0.9}, GOOD, "no_eligible_heads"),
        ({"eps_row": 0.1}, TIGHT, "caps_leave_nothing"),
        ({"eps_row": 0.2, "min_saving": 0.3}, TIGHT, "below_min_saving"),
        ({"streak": 2}, GOOD, "streak"),
        ({"eps_row": 0.5}, TIGHT, "audit_failed"),
    ],
)
def test_a_rejected_layer_keeps_everything_and_says_why(prompt, config, mass, code):
    watch = monitor(prompt, **config)
    reader = Reader(prompt, attention(prompt, mass))
    decision = watch.observe(3, reader)
    assert not decision.accepted
    assert decision.removed == ()
    assert len(decision.kept_tokens) == prompt.n_tokens
    assert watch.trials[0].verdict.code == code
    assert code in VERDICTS
    assert watch.reason().code == "no_layer_accepted"
    assert f"{code} at 3" in watch.reason().message
    if code != "audit_failed":
        assert len(reader.calls) == 1
        assert watch.trials[0].audits == ()


def test_rows_that_the_proposal_has_not_seen_can_fail_the_audit(prompt):
    watch = monitor(prompt)
    spoil = [0.3, 0.1, 0.3, 0.1, 0.1, 0.1]
    assert not watch.observe(3, Reader(prompt, spoiled(prompt, GOOD, spoil))).accepted
    trial = watch.trials[0]
    assert trial.verdict.code == "audit_failed"
    assert "suffix_rows" in trial.verdict.message
    # Six rows of the suffix lose what is spoiled, six what the proposal saw.
    assert trial.audits[0].eta_hat == pytest.approx((0.5 * 0.7 + 0.5 * 0.04,) * HEADS, rel=1e-4)


def test_the_first_layer_that_passes_is_used_and_ends_the_watch(prompt):
    watch = monitor(prompt)
    assert not watch.observe(3, Reader(prompt, attention(prompt, SINKS))).accepted
    assert watch.observe(5, Reader(prompt, attention(prompt, GOOD))).accepted
    with pytest.raises(ConfigError, match="layer 7"):
        watch.observe(7, Reader(prompt, attention(prompt, GOOD)))


@pytest.mark.parametrize(("before", "layer"), [((), 4), ((5,), 3), ((3,), 3)])
def test_layers_are_observed_in_order_and_only_the_monitored_ones(prompt, before, layer):
    watch = monitor(prompt)
    reader = Reader(prompt, attention(prompt, SINKS))
    for earlier in before:
        watch.observe(earlier, reader)
    with pytest.raises(ConfigError, match="may not be observed"):
        watch.observe(layer, reader)


def test_the_audits_rows_are_read_only_after_the_set_is_fixed(prompt):
    watch = monitor(prompt)
    reader = Reader(prompt, attention(prompt, GOOD))
    decision = watch.observe(3, reader)
    (first, with_tokens), (second, without) = reader.calls
    assert first == tuple(watch.proposal_rows.tolist())
    assert (with_tokens, without) == (True, False)
    drawn = {row for observer in watch.setup().observers for row in observer.rows}
    gone = {token for i in decision.removed for token in range(*prompt.chunk_spans[i])}
    assert set(second) == drawn - gone - set(first)
    assert list(second) == sorted(second)


def test_the_set_does_not_depend_on_the_audits_draws(prompt):
    sets = set()
    for seed in range(8):
        watch = monitor(prompt, seed=seed, audit=auditing(method="sample"))
        watch.observe(3, Reader(prompt, attention(prompt, GOOD, jitter=0.5)))
        sets.add(watch.trials[0].removed)
    assert len(sets) == 1


def test_a_removed_row_loses_nothing(prompt):
    # Rows inside removed chunks look at earlier removed chunks with all they have.
    inside = {row: [1.0 if i == 0 else 0.0 for i in range(6)] for i in (2, 4) for row in range(*prompt.chunk_spans[i])}
    audit = auditing(observers=(PromptRows(),), method="enumerate")
    watch = monitor(prompt, audit=audit)
    assert watch.observe(3, Reader(prompt, attention(prompt, GOOD, rows=inside))).accepted
    result = watch.trials[0].audits[0]
    assert max(result.eta_hat) < 0.05
    support = prompt.n_tokens - prompt.chunk_spans[0][0] - 1
    assert result.m == support
    assert result.retained_share == pytest.approx(1 - 30 / support)


def test_what_is_audited_equals_a_recomputation_from_the_full_matrix(prompt):
    weights = attention(prompt, GOOD, jitter=1.0)
    watch = monitor(prompt)
    removed = watch.observe(3, Reader(prompt, weights)).removed
    gone = [token for i in removed for token in range(*prompt.chunk_spans[i])]
    lost = weights[..., gone].double().sum(-1)
    lost[:, gone] = 0.0
    for observer, audit in zip(watch.setup().observers, watch.trials[0].audits, strict=True):
        assert audit.m == len(observer.rows)
        assert audit.eta_hat == pytest.approx(lost[:, list(observer.rows)].mean(-1).tolist(), abs=1e-6)


def test_levels_follow_from_the_layers_that_may_be_audited(prompt):
    watch = monitor(prompt, layers=(3, 5, 7, 9), audit=auditing(delta=0.1, method="sample"))
    watch.observe(5, Reader(prompt, attention(prompt, GOOD)))
    assert [audit.level for audit in watch.trials[0].audits] == pytest.approx([0.05 / 16] * 2)
    assert watch.setup().monitored_layers == 4


def test_a_streak_needs_consecutive_layers_that_agree(prompt):
    watch = monitor(prompt, streak=2)
    good, other = Reader(prompt, attention(prompt, GOOD)), Reader(prompt, attention(prompt, OTHER))
    assert not watch.observe(3, good).accepted
    assert not watch.observe(5, other).accepted
    assert watch.trials[1].streak == 1
    assert watch.trials[1].distance == 1.0
    assert watch.observe(7, other).accepted
    assert watch.trials[2].streak == 2
    assert watch.trials[2].distance == 0.0


@pytest.mark.parametrize(
    ("config", "between", "code"),
    [
        ({}, SINKS, "no_document_mass"),
        ({"eps_row": 0.1}, TIGHT, "caps_leave_nothing"),
        ({"eps_row": 0.2, "min_saving": 0.3}, TIGHT, "below_min_saving"),
    ],
)
def test_a_rejected_layer_resets_the_streak(prompt, config, between, code):
    watch = monitor(prompt, streak=2, **config)
    good = Reader(prompt, attention(prompt, GOOD))
    watch.observe(3, good)
    watch.observe(5, Reader(prompt, attention(prompt, between)))
    assert not watch.observe(7, good).accepted
    assert [trial.verdict.code for trial in watch.trials] == ["streak", code, "streak"]
    assert [trial.streak for trial in watch.trials] == [1, 0, 1]
    assert watch.trials[2].distance is None


def test_a_failed_audit_resets_the_streak(prompt):
    watch = monitor(prompt, layers=(3, 5, 7, 9), streak=2)
    bad = Reader(prompt, spoiled(prompt, GOOD, [0.3, 0.1, 0.3, 0.1, 0.1, 0.1]))
    good = Reader(prompt, attention(prompt, GOOD))
    for layer, reader in ((3, bad), (5, bad), (7, good)):
        assert not watch.observe(layer, reader).accepted
    assert [trial.verdict.code for trial in watch.trials] == ["streak", "audit_failed", "streak"]
    assert watch.observe(9, good).accepted


def test_a_streak_of_one_is_no_streak(prompt):
    watch = monitor(prompt, streak=1, theta=0.0)
    watch.observe(3, Reader(prompt, attention(prompt, SINKS)))
    assert watch.observe(5, Reader(prompt, attention(prompt, OTHER))).accepted


def test_an_audit_row_that_is_no_number_rejects_the_layer(prompt):
    weights = attention(prompt, GOOD)
    weights[:, prompt.suffix_span[0], 5:] = float("nan")
    watch = monitor(prompt)
    assert not watch.observe(3, Reader(prompt, weights)).accepted
    assert watch.trials[0].verdict.code == "not_finite"
    assert watch.observe(5, Reader(prompt, attention(prompt, GOOD))).accepted


def test_everything_of_the_audit_is_fixed_before_attention_is_seen(prompt):
    one, other = monitor(prompt), monitor(prompt)
    before = one.setup()
    one.observe(3, Reader(prompt, attention(prompt, GOOD)))
    other.observe(3, Reader(prompt, attention(prompt, OTHER)))
    assert before == one.setup() == other.setup()


def test_a_seed_is_fresh_unless_given(prompt):
    def seed_of(given=None, **audit):
        config = pruning(audit=auditing(**audit))
        return Monitor(config, prompt, (3,), HEADS, GROUPS, seed=given).seed

    assert seed_of() != seed_of()
    assert 0 <= seed_of() < 2**53
    assert seed_of(seed=7) == 7
    assert seed_of(9, seed=7) == 9


@pytest.mark.parametrize(
    ("prompt", "config", "code"),
    [
        (layout(()), {}, "no_chunks"),
        (layout(protected=range(6)), {}, "nothing_removable"),
        (layout(), {"m0": 6}, "too_few_chunks"),
        (layout((90, 5, 5), protected=(0,)), {"min_saving": 0.3}, "saving_out_of_reach"),
        (layout(suffix=1), {}, "audit_support"),
    ],
)
def test_a_request_that_cannot_be_pruned_is_known_before_anything_is_read(prompt, config, code):
    watch = monitor(prompt, **config)
    assert watch.layers == ()
    assert watch.bypass.code == watch.reason().code == code
    assert code in VERDICTS
    assert watch.finish() == ()
    with pytest.raises(ConfigError):
        watch.observe(3, Reader(prompt, torch.zeros(HEADS, prompt.n_tokens, prompt.n_tokens)))


def test_a_suffix_of_one_row_may_be_audited_over_the_whole_prompt():
    prompt = layout(suffix=1)
    watch = monitor(prompt, audit=auditing(observers=(PromptRows(),)))
    assert watch.bypass is None
    assert watch.observe(3, Reader(prompt, attention(prompt, GOOD))).accepted


def test_no_monitored_layer_is_a_reason(prompt):
    assert monitor(prompt, layers=()).reason().code == "no_monitored_layer"


def test_a_run_that_never_reached_a_layer_says_so(prompt):
    assert monitor(prompt).reason().code == "not_observed"


@pytest.mark.parametrize(("layers", "heads", "groups"), [((5, 3), 4, 2), ((3, 3), 4, 2), ((3,), 4, 3), ((3,), 0, 1)])
def test_layers_and_heads_that_make_no_model_are_refused(prompt, layers, heads, groups):
    with pytest.raises(ConfigError):
        Monitor(pruning(), prompt, layers, heads, groups)


def test_an_audit_that_can_never_pass_is_refused_when_model_and_configuration_meet(prompt):
    with pytest.raises(ConfigError, match="m_a >= "):
        monitor(prompt, audit=auditing(bound="hoeffding", m_a=10))


def test_the_finished_trial_holds_row_maxima_and_a_bound_that_follows_from_its_numbers(prompt):
    watch = monitor(prompt)
    weights = attention(prompt, GOOD, jitter=0.5)
    watch.observe(3, Reader(prompt, attention(prompt, SINKS)))
    watch.observe(5, Reader(prompt, weights))
    assert watch.trials[1].row_max == ()
    rejected, accepted = watch.finish()
    assert rejected.row_max == ()
    assert rejected.dual is None
    for head in range(HEADS):
        expected = [
            float(weights[head, watch.proposal_rows, start:end].sum(-1).max()) for start, end in prompt.chunk_spans
        ]
        assert accepted.row_max[head] == pytest.approx(expected, rel=1e-6)
    dual = accepted.dual
    assert dual.bound == dual_value(dual.cap_cost, dual.chunk_cost, dual.t, prompt.chunk_tokens, [True] * 6, dual.k_max)
    assert dual.gap == dual.bound - accepted.tokens_saved
    assert watch.finish() == (rejected, accepted)


def test_the_bound_can_be_left_out(prompt):
    watch = monitor(prompt, dual_bound="never")
    watch.observe(3, Reader(prompt, attention(prompt, GOOD)))
    (trial,) = watch.finish()
    assert trial.dual is None
    assert trial.row_max


def test_a_rejected_last_layer_is_finished_too(prompt):
    watch = monitor(prompt)
    watch.observe(3, Reader(prompt, attention(prompt, SINKS)))
    (trial,) = watch.finish()
    assert trial.dual is None
    assert len(trial.row_max) == HEADS


def test_trials_survive_json(prompt):
    watch = monitor(prompt)
    watch.observe(3, Reader(prompt, attention(prompt, GOOD, jitter=0.5)))
    (trial,) = watch.finish()
    assert LayerTrial.model_validate_json(trial.model_dump_json()) == trial


def test_caps_that_already_imply_the_audit_are_told(prompt):
    suffix = auditing(observers=(SuffixRows(),), eps_audit=0.6)
    watch = monitor(prompt, eps_row=0.1, audit=suffix)
    watch.observe(3, Reader(prompt, attention(prompt, GOOD)))
    # Six rows may lose 0.1, six are not capped: 0.55 on average whatever happens.
    assert watch.trials[0].audits[0].caps_imply
    watch = monitor(prompt, eps_row=0.3, audit=suffix)
    watch.observe(3, Reader(prompt, attention(prompt, GOOD)))
    assert not watch.trials[0].audits[0].caps_imply


# -- looking at the draws in batches -------------------------------------------------------------------------------

LARGE = (60,) * 6


def drawn(watch, kind):
    return next(info.rows for info in watch.setup().observers if info.kind == kind)


def read_rows(reader):
    """Every row read, call by call, those of the proposal first."""
    return [row for rows, _ in reader.calls for row in rows]


def test_a_sequential_audit_reads_in_batches_and_nothing_after_the_outcome_is_certain():
    prompt = layout(LARGE)
    watch = monitor(prompt, audit=auditing(sequential=True, m_a=300))
    reader = Reader(prompt, attention(prompt, GOOD, jitter=0.3))
    decision = watch.observe(3, reader)
    assert decision.accepted
    suffix, rows = watch.trials[0].audits
    assert (suffix.method, suffix.m, suffix.announced, suffix.ended) == ("enumerate", 12, None, None)
    assert (rows.method, rows.announced, rows.ended) == ("sample", 300, "passed")
    assert rows.m < 100
    gone = {token for i in decision.removed for token in range(*prompt.chunk_spans[i])}
    looked = set(drawn(watch, "prompt_rows")[: rows.m]) | set(drawn(watch, "suffix_rows"))
    assert set(read_rows(reader)) == looked - gone | set(watch.proposal_rows.tolist())
    assert len(reader.calls) >= 3, "the proposal, the suffix, one batch or more"


def test_no_row_is_read_twice_at_a_layer():
    prompt = layout(LARGE)
    observers = (PromptRows(), SuffixRows(), WeightedRows(decay=0.9))
    watch = monitor(prompt, audit=auditing(observers=observers, sequential=True, method="sample", m_a=300))
    reader = Reader(prompt, attention(prompt, GOOD, jitter=0.3))
    assert watch.observe(3, reader).accepted
    rows = read_rows(reader)
    assert len(rows) == len(set(rows))
    assert min(audit.m for audit in watch.trials[0].audits) > 12, "draws of the suffix repeat"


def test_a_sequential_audit_gives_what_a_full_look_gives():
    prompt = layout(LARGE)
    for mass, accepted in ((GOOD, True), (TIGHT, False)):
        verdicts = []
        for sequential in (False, True):
            watch = monitor(prompt, eps_row=0.5, audit=auditing(sequential=sequential, m_a=300))
            verdicts.append(watch.observe(3, Reader(prompt, attention(prompt, mass))).accepted)
        assert verdicts == [accepted, accepted]


def test_the_first_distribution_that_fails_ends_a_sequential_audit():
    prompt = layout(LARGE)
    spoil = [0.3, 0.1, 0.3, 0.1, 0.1, 0.1]
    watch = monitor(prompt, audit=auditing(observers=(PromptRows(), SuffixRows()), sequential=True, m_a=300))
    reader = Reader(prompt, spoiled(prompt, GOOD, spoil))
    assert not watch.observe(3, reader).accepted
    trial = watch.trials[0]
    assert [audit.observer for audit in trial.audits] == ["suffix_rows"], "the exact mean comes first"
    assert set(read_rows(reader)) == set(range(*prompt.suffix_span))
    assert "suffix_rows" in trial.verdict.message


def test_a_sequential_audit_that_cannot_pass_is_given_up():
    prompt = layout(LARGE)
    # Rows of the documents look at the removed chunks; those of the suffix do not.
    inside = {row: [0.5, 0.0, 0.4, 0.0, 0.1, 0.0] for row in range(prompt.chunk_spans[5][0], prompt.suffix_span[0])}
    audit = auditing(observers=(PromptRows(),), sequential=True, m_a=300, eps_audit=0.05)
    watch = monitor(prompt, audit=audit)
    reader = Reader(prompt, attention(prompt, GOOD, rows=inside))
    assert not watch.observe(3, reader).accepted
    (result,) = watch.trials[0].audits
    assert result.ended == "hopeless"
    assert result.m < 300
    assert set(read_rows(reader)) <= set(drawn(watch, "prompt_rows")[: result.m]) | set(watch.proposal_rows.tolist())


def test_a_row_that_is_no_number_rejects_a_layer_in_a_sequential_audit_too():
    prompt = layout(LARGE)
    weights = attention(prompt, GOOD)
    weights[:, prompt.suffix_span[0], 5:] = float("nan")
    watch = monitor(prompt, audit=auditing(sequential=True, m_a=300))
    assert not watch.observe(3, Reader(prompt, weights)).accepted
    assert watch.trials[0].verdict.code == "not_finite"


# -- probe queries ---------------------------------------------------------------------------------------------------


class ProbingReader(Reader):
    """A reader that also knows what every probe of a bank places on the chunks, ``[HEADS, bank, k]``."""

    def __init__(self, prompt, weights, masses):
        super().__init__(prompt, weights)
        self.masses, self.asked = masses, []

    def probes(self, places):
        self.asked.append(tuple(places.tolist()))
        return self.masses[:, places]


def questions(count):
    return ProbeQueries(queries=tuple(f"question {i}" for i in range(count)))


def probe_masses(count, chunk_mass):
    spread = 0.8 + 0.4 * torch.rand(HEADS, count, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return spread * torch.tensor(chunk_mass, dtype=torch.float64)


def test_probes_are_judged_by_what_they_place_on_the_removed_chunks(prompt):
    masses = probe_masses(20, GOOD)
    reader = ProbingReader(prompt, attention(prompt, GOOD), masses)
    watch = monitor(prompt, audit=auditing(observers=(questions(20),)))
    assert watch.probes == tuple(range(20))
    decision = watch.observe(3, reader)
    assert decision.accepted
    (audit,) = watch.trials[0].audits
    assert (audit.observer, audit.method, audit.m, audit.retained_share) == ("probe_queries", "enumerate", 20, None)
    assert audit.eta_hat == pytest.approx(masses[..., list(decision.removed)].sum(-1).mean(1).tolist(), rel=1e-8)
    assert not audit.caps_imply
    assert len(reader.calls) == 1, "no rows but the proposal's"


def test_probes_can_fail_an_audit_that_the_prompts_own_rows_pass(prompt):
    reader = ProbingReader(prompt, attention(prompt, GOOD), probe_masses(20, OTHER))
    watch = monitor(prompt, audit=auditing(observers=(SuffixRows(), questions(20))))
    assert not watch.observe(3, reader).accepted
    assert [audit.accepted for audit in watch.trials[0].audits] == [True, False]
    assert "probe_queries" in watch.trials[0].verdict.message


@pytest.mark.parametrize("sequential", [False, True])
def test_probes_are_run_last_and_only_if_all_else_passed(prompt, sequential):
    reader = ProbingReader(prompt, spoiled(prompt, GOOD, [0.3, 0.1, 0.3, 0.1, 0.1, 0.1]), probe_masses(20, GOOD))
    audit = auditing(observers=(questions(20), SuffixRows(), PromptRows()), sequential=sequential)
    watch = monitor(prompt, audit=audit)
    assert not watch.observe(3, reader).accepted
    assert reader.asked == []
    assert "probe_queries" not in [audit.observer for audit in watch.trials[0].audits]


def test_each_probe_runs_once_however_often_it_is_drawn(prompt):
    reader = ProbingReader(prompt, attention(prompt, GOOD), probe_masses(100, GOOD))
    watch = monitor(prompt, audit=auditing(observers=(questions(100),), m_a=90))
    assert watch.observe(3, reader).accepted
    places = drawn(watch, "probe_queries")
    assert len(set(places)) < len(places) == 90
    assert reader.asked == [tuple(sorted(set(places)))]


def test_a_sequential_audit_runs_probes_in_batches(prompt):
    reader = ProbingReader(prompt, attention(prompt, GOOD), probe_masses(1000, GOOD))
    watch = monitor(prompt, audit=auditing(observers=(questions(1000),), m_a=300, sequential=True))
    assert watch.observe(3, reader).accepted
    (audit,) = watch.trials[0].audits
    assert audit.m < 100
    ran = [place for places in reader.asked for place in places]
    assert sorted(ran) == sorted(set(drawn(watch, "probe_queries")[: audit.m]))


def test_a_probe_that_gives_no_number_rejects_the_layer(prompt):
    masses = probe_masses(20, GOOD)
    masses[1, 7] = float("nan")
    watch = monitor(prompt, audit=auditing(observers=(questions(20),)))
    assert not watch.observe(3, ProbingReader(prompt, attention(prompt, GOOD), masses)).accepted
    assert watch.trials[0].verdict.code == "not_finite"


def test_probes_asked_of_a_reader_of_rows_are_refused(prompt):
    watch = monitor(prompt, audit=auditing(observers=(questions(20),)))
    with pytest.raises(ConfigError, match="LocalBackend"):
        watch.observe(3, Reader(prompt, attention(prompt, GOOD)))


def test_a_monitor_without_probes_or_bypassed_asks_for_none(prompt):
    assert monitor(prompt).probes == ()
    assert monitor(prompt, m0=6, audit=auditing(observers=(questions(20),))).probes == ()


def test_jaccard_distance():
    assert jaccard_distance((1, 2), (2, 3)) == pytest.approx(2 / 3)
    assert jaccard_distance((1,), (1,)) == 0.0
    assert jaccard_distance((1,), ()) == 1.0
    assert jaccard_distance((), ()) == 0.0


def test_every_code_has_a_sentence():
    assert all(text.endswith(".") for text in VERDICTS.values())


@pytest.mark.slow
def test_records_of_a_large_layer_stay_small_and_the_rule_takes_milliseconds():
    heads, k = 32, 50
    prompt = layout((60,) * k, suffix=32)
    watch = Monitor(pruning(streak=64), prompt, tuple(range(1, 9)), heads, 8, seed=1)
    generator = torch.Generator().manual_seed(0)

    def read(rows, want_tokens):
        weights = torch.softmax(torch.randn(heads, len(rows), prompt.n_tokens, generator=generator), dim=-1)
        return Reader(prompt, weights)(torch.arange(len(rows)), want_tokens)

    inside = []
    for layer in watch.layers:
        rows = read(watch.proposal_rows, True)
        started = time.perf_counter()
        watch.observe(layer, lambda *_, rows=rows: rows)
        inside.append(time.perf_counter() - started)
    size = sum(len(trial.model_dump_json()) for trial in watch.finish())
    assert size < 200_000
    assert min(inside) < 0.05
