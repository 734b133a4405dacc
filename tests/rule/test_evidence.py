"""Evidence: which heads and rows count, what they say, and that no guarantee comes from them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError
from synthetic import GROUPS, HEADS, Reader, attention, layout, pruning

from entroprefill_rag.config import HeadProfile
from entroprefill_rag.rule.evidence import QUESTION_ROWS, ROWS_BEFORE, Evidence, EvidenceRows, excess
from entroprefill_rag.rule.monitor import Monitor
from entroprefill_rag.rule.proposal import Proposer
from entroprefill_rag.rule.scoring import evidence_scores

EVEN = (1.0 / HEADS,) * HEADS
GOOD = [0.02, 0.2, 0.01, 0.2, 0.03, 0.04]
OTHER = [0.2, 0.02, 0.2, 0.01, 0.04, 0.03]


def profile(*heads, layer=7):
    return HeadProfile(name="test", weights=((layer, EVEN),), pooled=((layer, heads),))


def test_heads_of_different_mass_have_the_same_say():
    evidence = Evidence(profile((3, 0, 0.5), (7, 1, 0.5)), mu_min=0.01)
    evidence.note(3, np.array([[0.5, 0.3], [9.0, 9.0]]), np.zeros((2, 2)))
    evidence.note(7, np.array([[9.0, 9.0], [0.01, 0.03]]), np.zeros((2, 2)))
    assert evidence.at(7) == pytest.approx([(0.625 + 0.25) / 2, (0.375 + 0.75) / 2])


def test_what_the_words_before_the_question_look_at_too_is_no_evidence():
    evidence = Evidence(profile((3, 0, 1.0)), mu_min=0.01)
    evidence.note(3, np.array([[0.3, 0.1]]), np.array([[0.3, 0.05]]))
    assert evidence.at(7) == pytest.approx([0.0, 0.125])


def test_a_head_that_hardly_looks_or_holds_no_numbers_has_no_say():
    evidence = Evidence(profile((3, 0, 0.25), (3, 1, 0.25), (7, 0, 0.5)), mu_min=0.05)
    evidence.note(3, np.array([[0.01, 0.03], [np.nan, 0.3]]), np.zeros((2, 2)))
    assert evidence.at(7) is None
    evidence.note(7, np.array([[0.1, 0.3], [0.2, 0.2]]), np.zeros((2, 2)))
    assert evidence.at(7) == pytest.approx([0.25, 0.75])
    evidence = Evidence(profile((3, 0, 1.0)), mu_min=0.05)
    evidence.note(3, np.array([[0.1, 0.3]]), np.array([[np.inf, 0.3]]))
    assert evidence.at(7) is None


@given(data=st.data(), k=st.integers(1, 6))
def test_excess_is_a_share_of_what_is_on_all_chunks_less_another(data, k):
    masses = arrays(np.float64, (3, k), elements=st.floats(0.0, 1.0))
    question, before = data.draw(masses) / k, data.draw(masses) / k
    shares, mass = excess(question, before)
    assert mass == pytest.approx(question.sum(axis=1), abs=1e-9)
    assert np.isfinite(shares).all()
    assert (shares <= 1.0 + 1e-9).all()
    for head in np.flatnonzero(mass > 1e-6):
        assert shares[head] * mass[head] == pytest.approx(question[head] - before[head], abs=1e-12)
    same, _ = excess(question, question)
    assert not same.any()


def test_the_rows_are_the_questions_own_and_those_before_it():
    prompt = replace(layout(suffix=12), query_span=None)
    end = prompt.n_tokens
    instead = torch.arange(end - 6, end)
    rows = EvidenceRows.of(prompt, instead)
    assert (rows.rows.tolist(), rows.own) == (instead.tolist(), 6)
    rows = EvidenceRows.of(replace(prompt, query_span=(end - 9, end - 2)), instead)
    assert (rows.rows.tolist(), rows.own) == ([*range(end - 9, end - 2), *range(end - 12, end - 9)], 7)
    masses = np.arange(2 * 10 * 3, dtype=np.float64).reshape(2, 10, 3)
    question, before = rows.means(masses)
    assert question == pytest.approx(masses[:, :7].mean(axis=1))
    assert before == pytest.approx(masses[:, 7:].mean(axis=1))
    first = EvidenceRows.of(replace(prompt, query_span=(end - 12, end - 2)), instead)
    assert not first.means(masses)[1].any(), "nothing before it: nothing to take off"


def test_of_a_long_question_the_last_rows_are_read():
    prompt = layout(suffix=200)
    end = prompt.n_tokens
    rows = EvidenceRows.of(replace(prompt, query_span=(end - 150, end - 5)), torch.arange(end - 6, end))
    assert rows.own == QUESTION_ROWS
    assert rows.rows.tolist() == [*range(end - 5 - QUESTION_ROWS, end - 5), *range(end - 150 - ROWS_BEFORE, end - 150)]


def test_only_layers_up_to_the_monitored_one_are_wanted():
    known = HeadProfile(name="test", weights=(), pooled=((5, ((2, 0, 1.0),)), (9, ((2, 0, 0.5), (8, 1, 0.5)))))
    evidence = Evidence(known, mu_min=0.05)
    assert evidence.layers((5,)) == (2,)
    assert evidence.layers((5, 9)) == (2, 8)
    assert evidence.layers((6,)) == ()
    assert Evidence(None, 0.05).layers((5, 9)) == ()


@pytest.mark.parametrize(
    "heads",
    [((8, 0, 1.0),), ((0, 0, 1.0),), ((3, 0, 0.5),), ((3, 0, 0.5), (3, 0, 0.5)), ((3, -1, 1.0),), ((3, 0, 0.0),), ()],
)
def test_heads_not_yet_seen_twice_named_or_without_a_whole_share_are_refused(heads):
    with pytest.raises(ValidationError, match="layer 7"):
        profile(*heads)


def test_chunks_are_ranked_by_an_earlier_layer_and_judged_by_their_own():
    prompt = layout()
    config = pruning(target_saving=0.5, eps_row=1.0, head_weights=profile((3, 0, 1.0)))
    proposer = Proposer(config, prompt, GROUPS)
    proposer.note(3, Reader(prompt, attention(prompt, OTHER)))
    trial = proposer.propose(7, Reader(prompt, attention(prompt, GOOD))(proposer.rows, True)).trial
    # By its own rows it would be (0, 2, 4), as without the profile's heads.
    assert trial.removed == (1, 3, 5)
    assert trial.evidence == pytest.approx(np.array(OTHER) / sum(OTHER), rel=1e-5)
    # What it costs is what these rows lose at layer 7.
    assert trial.pooled_mass == pytest.approx(GOOD, rel=1e-5)
    assert trial.pooled_discarded == pytest.approx(0.44, rel=1e-5)
    assert trial.max_discarded == pytest.approx(0.44, rel=1e-5)


def test_evidence_from_the_layer_alone_is_a_setting():
    prompt = layout()
    config = pruning(target_saving=0.5, head_weights=profile((3, 0, 1.0)), evidence="layer")
    proposer = Proposer(config, prompt, GROUPS)
    assert proposer.evidence_layers((7,)) == ()
    proposer.note(3, Reader(prompt, attention(prompt, OTHER)))
    trial = proposer.propose(7, Reader(prompt, attention(prompt, GOOD))(proposer.rows, True)).trial
    assert trial.removed == (0, 2, 4)
    assert trial.evidence == ()


def test_a_cap_refuses_what_evidence_would_drop():
    prompt = layout()
    masses = [0.02, 0.45, 0.01, 0.02, 0.03, 0.04]
    config = pruning(target_saving=0.5, eps_row=0.3, head_weights=profile((3, 0, 1.0)))
    proposer = Proposer(config, prompt, GROUPS)
    proposer.note(3, Reader(prompt, attention(prompt, OTHER)))
    trial = proposer.propose(7, Reader(prompt, attention(prompt, masses))(proposer.rows, True)).trial
    assert trial.removed == (3, 5)
    assert trial.max_discarded <= 0.3


def test_a_monitor_names_the_layers_it_wants_and_notes_them():
    prompt = layout()
    config = pruning(target_saving=0.5, head_weights=profile((3, 0, 0.5), (7, 0, 0.5)))
    monitor = Monitor(config, prompt, (7,), HEADS, GROUPS, seed=1)
    assert monitor.layers == (7,)
    assert monitor.evidence_layers == (3, 7)
    reader = Reader(prompt, attention(prompt, OTHER))
    monitor.note(3, reader)
    assert monitor.trials == []
    decision = monitor.observe(7, Reader(prompt, attention(prompt, OTHER)))
    assert decision.removed == monitor.trials[0].removed == (1, 3, 5)


def test_a_bypassed_request_wants_no_evidence():
    prompt = layout((10, 10))
    config = pruning(m0=2, head_weights=profile((3, 0, 1.0)))
    monitor = Monitor(config, prompt, (7,), HEADS, GROUPS, seed=1)
    assert monitor.bypass is not None
    assert monitor.evidence_layers == ()


def test_the_question_is_told_from_the_words_before_it():
    prompt = layout(suffix=12)
    start, end = prompt.suffix_span
    prompt = replace(prompt, query_span=(start + 4, end - 2))
    habit = [0.2, 0.02, 0.1, 0.01, 0.04, 0.03]
    asked = [0.2, 0.02, 0.1, 0.05, 0.04, 0.03]
    seen = attention(prompt, habit, rows=dict.fromkeys(range(start + 4, end), asked))
    proposer = Proposer(pruning(head_weights=profile((3, 0, 1.0)), eps_row=0.9, max_saving=0.9), prompt, GROUPS)
    proposer.note(3, Reader(prompt, seen))
    trial = proposer.propose(7, Reader(prompt, seen)(proposer.rows, True)).trial
    share = 0.04 / sum(asked)
    assert trial.evidence == pytest.approx([0, 0, 0, share, 0, 0], abs=1e-6)
    assert trial.scores == pytest.approx([0, 0, 0, 6 * share, 0, 0], abs=1e-5)
    assert 3 not in trial.removed


def test_a_chunk_of_no_tokens_scores_nothing():
    scores = evidence_scores(np.array([0.3, 0.0, -0.1]), np.array([10, 0, 30]))
    assert scores == pytest.approx([1.2, 0.0, -0.1 / 0.75])
