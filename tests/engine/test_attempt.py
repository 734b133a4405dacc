"""The reuse ledger in real runs: which draws are refused, what counts as an attempt, what an attempt may spend."""

import asyncio
import gc
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny import LOOSE, model, request, tokenizer

from entroprefill_rag import AuditConfig, LocalBackend, PruneResult, PruningConfig, ReuseLedger
from entroprefill_rag.config import ProbeQueries, PromptRows, SuffixRows, WeightedRows
from entroprefill_rag.engine.attempt import IRRELEVANT, configuration_key, prompt_key
from entroprefill_rag.engine.streaming import TextPiece
from entroprefill_rag.errors import ConfigError, LedgerError

STRICT = {"eps_row": 1e-9}  # no proposal, so no audit


def pruning(seed=None, audit=(), **more):
    """LOOSE with changes: of the audit in ``audit``, of all else as keywords."""
    changed = LOOSE.audit.model_copy(update={"seed": seed, **dict(audit)})
    return LOOSE.model_copy(update={"audit": changed, **more})


@pytest.fixture
def backend():
    with LocalBackend(model(), tokenizer(), name="tiny") as made:
        yield made


def record(backend, *arguments, asked=None, **more):
    return backend.generate(asked or request(), pruning(*arguments, **more), max_new_tokens=2).audit


def attempt(backend, *arguments, **more):
    return record(backend, *arguments, **more).audit.attempt


def refused(found):
    return (found.outcome, found.reason.code) == ("bypassed", "audit_reused")


def test_runs_with_fresh_draws_are_counted_and_each_has_its_delta(backend):
    found = [record(backend) for _ in range(3)]
    assert [one.audit.attempt for one in found] == [1, 2, 3]
    assert [one.audit.delta for one in found] == [0.05] * 3
    assert not any(one.replay for one in found)
    assert "it is attempt 3 at this prompt" in found[2].claims.probabilistic
    assert attempt(backend, asked=request(chunks=4)) == 1


def test_filter_mode_counts_too(backend):
    assert backend.prune(request(), pruning()).audit.audit.attempt == 1
    assert attempt(backend) == 2


def test_the_same_seed_and_configuration_is_a_replay_with_the_same_claim(backend):
    first, again = (record(backend, 7) for _ in range(2))
    assert (first.replay, again.replay) == (False, True)
    assert first.audit == again.audit
    assert first.claims.probabilistic == again.claims.probabilistic
    assert first.trials == again.trials
    assert any("replay" in text for text in again.claims.warnings)
    assert not any("A replay" in text for text in first.claims.warnings)
    assert attempt(backend) == 2


def test_the_seed_in_a_record_replays_it(backend):
    first = record(backend)
    again = record(backend, first.audit.seed)
    assert again.replay
    assert again.audit == first.audit
    assert refused(record(backend, first.audit.seed, eps_row=0.9))


def first_chunk_protected():
    asked = request()
    chunks = [chunk.model_copy(update={"protected": index == 0}) for index, chunk in enumerate(asked.chunks)]
    return asked.model_copy(update={"chunks": tuple(chunks)})


@pytest.mark.parametrize(
    "changed",
    [
        {"audit": {"m_a": 65}},
        {"audit": {"eps_audit": 0.9}},
        {"audit": {"delta": 0.04}},
        {"audit": {"bound": "kl"}},
        {"audit": {"sequential": True}},
        {"audit": {"union": "layers"}},
        {"audit": {"attempts": "all"}},
        {"audit": {"observers": (PromptRows(),)}},
        {"eps_row": 0.99},
        {"layers": (2, 4)},
        {"target_saving": 0.4},
        {"zeta": 0.2},
        {"asked": first_chunk_protected()},
    ],
    ids=str,
)
def test_draws_that_were_seen_accept_nothing_else(backend, changed):
    assert record(backend, 7).outcome == "pruned"
    found = record(backend, 7, **changed)
    assert refused(found)
    assert "attempt 1" in found.reason.message
    assert "Leave `audit.seed` out" in found.reason.message
    assert found.tokens_removed == 0
    # With fresh draws it may be asked.
    assert record(backend, **changed).audit.attempt == 2


def test_a_refused_run_is_answered_in_full(backend):
    layout = backend.layout(request(), LOOSE)
    record(backend, 7)
    result = backend.generate(request(), pruning(7, {"eps_audit": 0.9}), max_new_tokens=8, do_sample=False)
    ids = torch.tensor([layout.input_ids])
    output = model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert result.answer == backend.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert result.usage.kept_tokens == result.usage.prompt_tokens
    assert not backend.prune(request(), pruning(7, {"eps_audit": 0.9})).pruned


def test_a_rejected_layer_has_been_seen_as_well(backend):
    # Whether it passed or not, somebody may now choose another setting for what these draws show.
    failed = record(backend, 7, {"eps_audit": 0.06, "m_a": 200})
    assert failed.outcome == "bypassed"
    assert failed.trials[0].verdict.code == "audit_failed"
    assert refused(record(backend, 7, {"eps_audit": 0.95, "m_a": 200}))


def test_the_same_chunks_cut_elsewhere_are_something_else(backend):
    layout, info = backend.layout(request(), LOOSE), backend.model_info
    key = configuration_key(LOOSE, info, layout, (2, 3))
    start, end = layout.chunk_spans[0]
    moved = ((start, end - 1), *layout.chunk_spans[1:])
    other = type(layout)(**{**vars(layout), "chunk_spans": moved})
    assert prompt_key(info, other) == prompt_key(info, layout)
    assert configuration_key(LOOSE, info, other, (2, 3)) != key
    assert configuration_key(LOOSE, info, layout, (2, 4)) != key
    for change in ({"dtype": "bfloat16"}, {"kernel": "eager"}, {"device": "cuda:0"}):
        assert configuration_key(LOOSE, info.model_copy(update=change), layout, (2, 3)) != key
    for change in ({"name": "x"}, {"revision": "x"}, {"fingerprint": "x"}):
        assert prompt_key(info.model_copy(update=change), layout) != prompt_key(info, layout)


OTHER = {
    "enabled": False,
    "layers": (1, 2),
    "sink_tokens": 5,
    "proposal_rows": 8,
    "head_weights": "uniform",
    "entropy_over": "outside_sinks",
    "tau": 2.0,
    "zeta": 0.3,
    "mu_min": 0.01,
    "mass_min": 0.05,
    "alpha": 0.02,
    "lam": 0.5,
    "evidence": "layer",
    "reach": "all",
    "eps_row": 0.3,
    "rho": 0.5,
    "m0": 3,
    "min_saving": 0.05,
    "target_saving": 0.6,
    "max_saving": 0.8,
    "solver": "exact",
    "solver_seconds": 6.0,
    "streak": 2,
    "theta": 0.1,
    "dual_bound": "never",
    "decode_monitor": False,
    "drift_threshold": 0.5,
    "on_drift": "stop",
    "overflow": "drop_last",
    "include_text": True,
    "audit": {
        "observers": (WeightedRows(), ProbeQueries(queries=("a?", "b?"))),
        "eps_audit": 0.3,
        "delta": 0.01,
        "m_a": 100,
        "bound": "kl",
        "method": "sample",
        "union": "layers",
        "sequential": True,
        "attempts": "all",
        "seed": 3,
    },
}


def test_every_setting_is_either_listed_as_irrelevant_or_makes_another_configuration(backend):
    # A new setting fails here until somebody has decided which it is.
    assert set(OTHER) == set(PruningConfig.model_fields)
    assert set(OTHER["audit"]) == set(AuditConfig.model_fields)
    layout, info, default = backend.layout(request(), LOOSE), backend.model_info, PruningConfig()

    def key(config):
        return configuration_key(config, info, layout, (2, 3))

    for name, value in OTHER.items():
        if name == "audit":
            continue
        same = key(default.model_copy(update={name: value})) == key(default)
        assert same == (IRRELEVANT.get(name) is True), name
    for name, value in OTHER["audit"].items():
        changed = default.model_copy(update={"audit": default.audit.model_copy(update={name: value})})
        assert (key(changed) == key(default)) == (name in IRRELEVANT["audit"]), name


def test_what_cannot_change_the_audit_may_change_in_a_replay(backend):
    record(backend, 7)
    found = record(backend, 7, include_text=True, dual_bound="never", decode_monitor=False)
    assert (found.outcome, found.replay) == ("pruned", True)


def test_a_function_as_head_weights_is_never_taken_for_the_one_seen_before(backend):
    def even(entropies, eligible):
        return 0.0 * entropies + 1.0

    assert record(backend, 7, head_weights=even).outcome == "pruned"
    found = record(backend, 7, head_weights=even)
    assert refused(found)
    assert "a function" in found.reason.message


def test_a_run_that_reached_no_audit_has_seen_nothing(backend):
    found = record(backend, 7, **STRICT)
    assert (found.outcome, found.audit.attempt) == ("bypassed", 1)
    found = record(backend, 7)
    assert (found.outcome, found.audit.attempt, found.replay) == ("pruned", 1, False)


@pytest.mark.parametrize(
    "audit",
    [{"method": "enumerate"}, {"observers": (SuffixRows(),)}, {"m_a": 4000}],
    ids=["enumerate", "small support", "many observers"],
)
def test_an_audit_that_draws_nothing_is_exempt(backend, audit):
    found = [record(backend, 7, {**audit, "eps_audit": eps}) for eps in (0.95, 0.9, 0.85)]
    assert [one.outcome for one in found] == ["pruned"] * 3
    assert {one.method for one in found[0].audit.observers} == {"enumerate"}
    assert {one.audit.attempt for one in found} == {None}
    assert attempt(backend) == 1
    # Not even where draws of the same seed were seen.
    record(backend, 8)
    assert record(backend, 8, audit).outcome == "pruned"


def test_decoding_that_cannot_be_pruned_spends_no_attempt(backend):
    result = backend.generate(request(), pruning(7), max_new_tokens=2, num_beams=2)
    assert result.audit.reason.code == "generation_mode"
    assert attempt(backend, 7, {"eps_audit": 0.9}) == 1


def test_all_attempts_together_share_delta(backend):
    found = [record(backend, None, {"attempts": "all"}) for _ in range(3)]
    assert [one.audit.attempt for one in found] == [1, 2, 3]
    assert [one.audit.delta for one in found] == pytest.approx([0.05 / 2, 0.05 / 6, 0.05 / 12])
    statements = 2 * 4
    sampled = [next(audit for audit in one.trials[-1].audits if audit.method == "sample") for one in found]
    assert [one.level for one in sampled] == pytest.approx([0.05 / d / statements for d in (2, 6, 12)])
    assert found[1].audit.attempts == "all"
    assert "at most 0.00833333 in attempt 2 at this prompt" in found[1].claims.probabilistic
    assert "at most 0.05 in all attempts" in found[1].claims.probabilistic
    # Attempts that spend a delta of their own are counted all the same.
    record(backend)
    assert record(backend, None, {"attempts": "all"}).audit.delta == pytest.approx(0.05 / 30)


def test_a_replay_spends_what_the_attempt_did(backend):
    record(backend)
    first = record(backend, 7, {"attempts": "all"})
    record(backend)
    again = record(backend, 7, {"attempts": "all"})
    assert again.replay
    assert again.audit == first.audit
    assert again.audit.delta == pytest.approx(0.05 / 6)


def test_more_observers_are_drawn_for_a_smaller_delta(backend):
    audit = {"attempts": "all", "m_a": "auto", "eps_audit": 0.2, "method": "sample"}
    drawn = [record(backend, None, audit).audit.m_a for _ in range(3)]
    assert drawn == sorted(drawn)
    assert drawn[0] < drawn[2]


def test_an_attempt_that_may_spend_too_little_is_answered_in_full(backend):
    audit = {"attempts": "all", "bound": "hoeffding", "eps_audit": 0.2, "m_a": 76, "observers": (PromptRows(),)}
    codes = []
    for _ in range(4):
        found = record(backend, None, audit)
        codes.append(found.reason.code)
    assert codes[0] != "attempts_spent"
    assert codes[-1] == "attempts_spent"
    spent = codes.index("attempts_spent") + 1
    assert f"Attempt {spent} at this prompt may spend" in found.reason.message
    assert "m_a >= " in found.reason.message
    # It has looked at nothing, so it is no attempt.
    assert attempt(backend) == spent


def test_an_audit_that_not_even_the_first_attempt_can_pass_is_a_mistake(backend):
    audit = {"attempts": "all", "bound": "hoeffding", "eps_audit": 0.2, "m_a": 40, "observers": (PromptRows(),)}
    for _ in range(2):
        with pytest.raises(ConfigError, match="can never pass"):
            record(backend, None, audit)
    record(backend)
    with pytest.raises(ConfigError, match="can never pass"):
        record(backend, None, audit)
    assert attempt(backend) == 2


def test_without_a_ledger_nothing_is_counted_or_refused_and_the_record_says_so():
    with LocalBackend(model(), tokenizer(), ledger=False) as backend:
        assert backend.ledger is None
        first, second = record(backend, 7), record(backend, 7, eps_row=0.9)
        assert (first.outcome, second.outcome) == ("pruned", "pruned")
        assert (first.audit.attempt, second.replay) == (None, False)
        assert "no ledger was kept" in first.claims.probabilistic
        with pytest.raises(ConfigError, match="ledger=False"):
            record(backend, None, {"attempts": "all"})


@pytest.mark.parametrize("ledger", [True, "ledger.db", Path("ledger.db")], ids=repr)
def test_what_is_no_ledger_is_refused(ledger):
    touched = model()
    with pytest.raises(ConfigError, match=r"ReuseLedger\.open"):
        LocalBackend(touched, tokenizer(), ledger=ledger)
    assert touched.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("layer", "counts"), [(1, False), (4, True)])
def test_a_run_that_fails_counts_from_its_audit_on(backend, layer, counts):
    def fail(*_):
        raise RuntimeError("layer broke")

    hook = backend.anatomy.layers[layer].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="layer broke"):
        record(backend, 7)
    hook.remove()
    assert refused(record(backend, 7, eps_row=0.9)) == counts
    assert attempt(backend) == 2


def test_a_stream_that_nobody_reads_is_no_attempt_and_one_that_is_left_is_one(backend):
    stream = backend.stream(request(), pruning(7), max_new_tokens=500)
    assert refused(record(backend, 7, eps_row=0.9))
    del stream
    gc.collect()
    stream = backend.stream(request(), pruning(7, eps_row=0.9), max_new_tokens=500)
    assert isinstance(next(stream), PruneResult)
    stream.close()
    assert refused(record(backend, 7))
    assert record(backend, 7, eps_row=0.9).replay


def test_a_pending_answer_that_is_given_up_counts(backend):
    backend.begin(request(), pruning(7), max_new_tokens=500).close()
    assert refused(record(backend, 7, eps_row=0.9))


def test_a_run_that_is_cancelled_while_it_waits_is_no_attempt(backend):
    async def main():
        with backend._prefill_turn:
            task = asyncio.create_task(backend.agenerate(request(), pruning(7), max_new_tokens=2))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.2)

    asyncio.run(main())
    assert attempt(backend, 7, eps_row=0.9) == 1


def test_threads_on_one_prompt_are_different_attempts(backend):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: record(backend), range(16)))
    assert sorted(one.audit.attempt for one in found) == list(range(1, 17))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda index: record(backend, 7, eps_row=1.0 - 0.01 * (index % 2)), range(16)))
    # Whichever configuration came first has the draws; the other one has them never.
    won = {one.config["eps_row"] for one in found if one.outcome == "pruned"}
    assert len(won) == 1
    assert all(refused(one) for one in found if one.config["eps_row"] not in won)
    assert {one.audit.attempt for one in found if one.audit} == {17}


def test_the_note_is_made_before_any_draw_is_read(backend, monkeypatch):
    read = []

    def fail(self, slot):
        raise LedgerError("disk full")

    monkeypatch.setattr(ReuseLedger, "_spend", fail)
    from entroprefill_rag.engine import run

    real = run.read_rows
    monkeypatch.setattr(run, "read_rows", lambda *a, **k: read.append(a[2].tolist()) or real(*a, **k))
    found = record(backend, 7)
    assert (found.outcome, found.reason.code) == ("bypassed", "no_layer_accepted")
    assert [trial.verdict.code for trial in found.trials] == ["ledger_failed"] * 2
    assert "disk full" in found.trials[0].verdict.message
    assert read == [list(found.proposal_rows)] * 2
    assert not any(trial.audits for trial in found.trials)
    monkeypatch.undo()
    assert attempt(backend, 7, eps_row=0.9) == 1


def test_a_ledger_that_cannot_be_asked_means_an_answer_in_full(backend):
    backend.ledger.close()
    found = record(backend)
    assert (found.outcome, found.reason.code) == ("bypassed", "ledger_failed")
    assert "closed" in found.reason.message
    # What draws nothing needs no ledger.
    assert record(backend, None, {"method": "enumerate"}).outcome == "pruned"


def test_backends_may_share_a_ledger_and_models_are_told_apart():
    with ReuseLedger() as ledger:
        made = [LocalBackend(model(), tokenizer(), name=name, ledger=ledger) for name in ("one", "one", "two")]
        assert [attempt(backend) for backend in made] == [1, 2, 1]
        record(made[0], 7)
        assert refused(record(made[1], 7, eps_row=0.9))
        assert attempt(made[2], 7, eps_row=0.9) == 2
        for backend in made:
            backend.close()
        assert ledger.remembered == 2


def test_a_backend_keeps_a_ledger_of_its_own_unless_it_is_given_one():
    with LocalBackend(model(), tokenizer()) as one, LocalBackend(model(), tokenizer()) as other:
        assert [attempt(backend, 7, eps_row=cap) for backend, cap in ((one, 1.0), (other, 0.9))] == [1, 1]


@pytest.mark.slow
def test_two_processes_with_one_file_know_of_each_other(tmp_path):
    code = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        from tiny import LOOSE, model, request, tokenizer
        from entroprefill_rag import LocalBackend, ReuseLedger

        with ReuseLedger.open(sys.argv[2]) as ledger:
            backend = LocalBackend(model(), tokenizer(), name="tiny", ledger=ledger)
            audit = LOOSE.audit.model_copy(update={"seed": 7, "eps_audit": float(sys.argv[3])})
            for config in (LOOSE.model_copy(update={"audit": audit}), LOOSE, LOOSE):
                record = backend.generate(request(), config, max_new_tokens=1).audit
                print(record.reason.code, record.audit and record.audit.attempt, record.replay)
        """
    )

    def told(eps):
        command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path / "ledger.db"), eps]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line.split() for line in done.stdout.splitlines()]

    assert told("0.95") == [["accepted", str(r), "False"] for r in (1, 2, 3)]
    assert told("0.9") == [["audit_reused", "None", "False"], *(["accepted", str(r), "False"] for r in (4, 5))]
    assert told("0.95")[0] == ["accepted", "1", "True"]


def test_a_stream_tells_of_its_attempt_in_outcome_and_result(backend):
    items = list(backend.stream(request(), pruning(), max_new_tokens=3))
    assert items[0].audit.audit.attempt == items[-1].audit.audit.attempt == 1
    assert any(isinstance(item, TextPiece) for item in items)
