"""Evidence pooled over layers: which heads count, what they say, and that no guarantee comes from them."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from synthetic import GROUPS, HEADS, Reader, attention, layout, pruning

from entroprefill_rag.config import HeadProfile
from entroprefill_rag.rule.evidence import Evidence
from entroprefill_rag.rule.monitor import Monitor
from entroprefill_rag.rule.proposal import Proposer

EVEN = (1.0 / HEADS,) * HEADS
GOOD = [0.02, 0.2, 0.01, 0.2, 0.03, 0.04]
OTHER = [0.2, 0.02, 0.2, 0.01, 0.04, 0.03]


def profile(*heads, layer=7):
    return HeadProfile(name="test", weights=((layer, EVEN),), pooled=((layer, heads),))


def test_heads_of_different_mass_have_the_same_say():
    evidence = Evidence(profile((3, 0, 0.5), (7, 1, 0.5)), mu_min=0.01)
    evidence.note(3, np.array([[0.5, 0.3], [9.0, 9.0]]))
    evidence.note(7, np.array([[9.0, 9.0], [0.01, 0.03]]))
    assert evidence.at(7) == pytest.approx([(0.625 + 0.25) / 2, (0.375 + 0.75) / 2])


def test_a_head_that_hardly_looks_or_holds_no_numbers_has_no_say():
    evidence = Evidence(profile((3, 0, 0.25), (3, 1, 0.25), (7, 0, 0.5)), mu_min=0.05)
    evidence.note(3, np.array([[0.01, 0.03], [np.nan, 0.3]]))
    assert evidence.at(7) is None
    evidence.note(7, np.array([[0.1, 0.3], [0.2, 0.2]]))
    assert evidence.at(7) == pytest.approx([0.25, 0.75])


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
    proposer.note(3, Reader(prompt, attention(prompt, OTHER))(proposer.rows, True))
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
    proposer.note(3, Reader(prompt, attention(prompt, OTHER))(proposer.rows, True))
    trial = proposer.propose(7, Reader(prompt, attention(prompt, GOOD))(proposer.rows, True)).trial
    assert trial.removed == (0, 2, 4)
    assert trial.evidence == ()


def test_a_cap_refuses_what_evidence_would_drop():
    prompt = layout()
    masses = [0.02, 0.45, 0.01, 0.02, 0.03, 0.04]
    config = pruning(target_saving=0.5, eps_row=0.3, head_weights=profile((3, 0, 1.0)))
    proposer = Proposer(config, prompt, GROUPS)
    proposer.note(3, Reader(prompt, attention(prompt, OTHER))(proposer.rows, True))
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


def test_rows_without_tokens_are_no_evidence():
    prompt = layout()
    proposer = Proposer(pruning(head_weights=profile((3, 0, 1.0))), prompt, GROUPS)
    rows = Reader(prompt, attention(prompt, GOOD))(proposer.rows, True)
    with pytest.raises(ValueError, match="tokens=True"):
        proposer.note(3, type(rows)(rows.chunks, None))
    assert isinstance(rows.tokens, torch.Tensor)
