"""A run on a tiny model: every method, the order, resuming, failures, the time limit, and what is compared."""

import pytest
import torch

from entroprefill_rag.bench.methods import Method, catalogue, chosen
from entroprefill_rag.bench.questions import in_turn
from entroprefill_rag.bench.rankers import AtRandom, InOrder
from entroprefill_rag.bench.rows import Store
from entroprefill_rag.bench.runner import Heard, Runner, agreement
from entroprefill_rag.bench.session import Session, stamp_of

NAMES = ["random", "first", "midprefill-last", "midprefill-mean", "second-pass", "gold", "none"]
LAYERS, LAYER = 6, 3


@pytest.fixture
def runner(backend):
    return Runner(backend, {"random": AtRandom(0), "first": InOrder()}, max_new_tokens=3)


@pytest.fixture
def session(backend, runner, tmp_path):
    methods = chosen(catalogue(layer=LAYER, budget=0.5), NAMES)
    return Session(runner, methods, Store(tmp_path), stamp_of(backend, seed=0))


def rows_by_method(session, question):
    return {row.method: row for row in session.store.rows() if row.question == question}


def test_every_question_is_answered_by_every_method(session, questions):
    assert session.go(in_turn(questions))
    rows = session.store.rows()
    assert len(rows) == 3 * 8
    assert {row.status for row in rows if row.method != "gold"} == {"ok"}
    found = rows_by_method(session, "red-0")
    assert (found["full"].kept_share, found["full"].kl, found["full"].same_text) == (1.0, 0.0, True)
    assert (found["none"].kept, found["none"].need_met) == (0, False)
    assert (found["gold"].kept, found["gold"].need_met, found["gold"].gold_kept) == (1, True, 1)
    assert [row.status for row in rows if row.method == "gold" and not row.answerable] == ["skipped"]
    assert all(row.ttft == pytest.approx(sum(row.seconds.values())) for row in rows if row.ttft is not None)


def test_budgets_are_equal_and_work_is_counted(session, questions):
    session.go(questions[:1])
    found = rows_by_method(session, "red-0")
    for name in ("random", "first", "midprefill-last", "midprefill-mean", "second-pass"):
        assert 0.25 <= found[name].kept_share <= 0.5, name
    mean, second, full = found["midprefill-mean"], found["second-pass"], found["full"]
    assert (mean.outcome, mean.layer) == ("pruned", LAYER)
    n = full.prompt_tokens
    assert full.token_layers == n * LAYERS
    assert second.token_layers == n * (LAYER + 1) + second.prompt_tokens * LAYERS
    assert n * (LAYER + 1) < mean.token_layers < full.token_layers
    assert mean.kept == second.kept
    assert second.kv_bytes < mean.kv_bytes < full.kv_bytes
    assert found["first"].gold_kept == 1


def test_a_rerun_goes_on_where_the_first_one_stopped(session, questions, runner, monkeypatch):
    session.go(questions[:1])
    before = (session.store.folder / "rows.jsonl").read_text()
    asked = []
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda method, question: asked.append(question.id) or run(method, question))
    session.go(questions)
    assert "red-0" not in asked
    after = (session.store.folder / "rows.jsonl").read_text()
    assert after.startswith(before)
    assert len(session.store.rows()) == 24


def test_a_method_that_comes_later_is_compared_with_a_full_run_all_the_same(session, questions):
    everything = session.methods
    session.methods = [method for method in everything if method.name != "random"]
    session.go(questions[:1])
    session.methods = everything
    session.go(questions[:1])
    rows = session.store.rows()
    assert [row.method for row in rows].count("full") == 1
    late = next(row for row in rows if row.method == "random")
    assert late.kl is not None
    assert late.same_text is not None


def test_methods_alternate_from_question_to_question(session, questions):
    session.go(questions)
    orders = {}
    for row in session.store.rows():
        orders.setdefault(row.question, {})[row.place] = row.method
    told = [tuple(order[place] for place in sorted(order)) for order in orders.values()]
    assert len(set(told)) > 1


def test_no_question_is_begun_that_would_end_too_late(session, questions):
    session.minutes = 1e-9
    assert not session.go(questions)
    assert session.store.rows() == []


def test_a_failure_is_a_row_with_its_message(session, questions):
    session.methods = [*session.methods, Method("broken", "", "", "ranked", ranker="nobody")]
    session.go(questions[:1])
    broken = rows_by_method(session, "red-0")["broken"]
    assert (broken.status, broken.message) == ("failed", "KeyError: 'nobody'")
    assert broken.found is None


def test_where_the_full_run_fails_rows_are_kept_without_comparison(session, questions, runner, monkeypatch):
    run = runner.run
    broken = Method("full", "", "", "ranked", ranker="nobody")
    monkeypatch.setattr(
        runner, "run", lambda method, question: run(broken if method.kind == "full" else method, question)
    )
    session.go(questions[:1])
    found = rows_by_method(session, "red-0")
    assert found["full"].status == "failed"
    assert found["none"].status == "ok"
    assert found["none"].kl is None


def test_agreement_is_the_divergence_of_the_first_token():
    full, other = Heard("a", torch.tensor([0.5, 0.5]).log()), Heard("b", torch.tensor([0.75, 0.25]).log())
    found = agreement(full, other)
    expected = 0.5 * torch.log(torch.tensor(0.5 / 0.75)) + 0.5 * torch.log(torch.tensor(0.5 / 0.25))
    assert found["kl"] == pytest.approx(float(expected), abs=1e-6)
    assert (found["same_text"], found["same_first"]) == (False, True)
    assert agreement(full, None) == {}


def test_a_token_that_the_full_run_rules_out_adds_nothing():
    full = Heard("a", torch.tensor([0.0, -torch.inf]))
    assert agreement(full, Heard("a", torch.tensor([0.5, 0.5]).log()))["kl"] == pytest.approx(0.6931, abs=1e-4)


def test_random_chunks_are_the_same_in_each_run_and_others_for_another_question(questions):
    one, two = questions[0], questions[1]
    assert AtRandom(0).scores(one).tolist() == AtRandom(0).scores(one).tolist()
    assert AtRandom(0).scores(one).tolist() != AtRandom(0).scores(two).tolist()
    assert AtRandom(1).scores(one).tolist() != AtRandom(0).scores(one).tolist()
