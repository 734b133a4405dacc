"""What one layer proposes, and the envelope of what it may cost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import GROUPS, HEADS, Reader, attention, layout, pruning

from entroprefill_rag.errors import ConfigError
from entroprefill_rag.record import LayerTrial
from entroprefill_rag.rule.masses import RowMasses
from entroprefill_rag.rule.proposal import PROPOSED, Proposer, proposal_rows

LENIENT = {"mass_min": 0.0, "mu_min": 0.01, "min_saving": 0.0, "m0": 1, "eps_row": 1.0, "max_saving": 1.0}


def propose(config, prompt, weights, layer=7):
    proposer = Proposer(config, prompt, GROUPS)
    return proposer.propose(layer, Reader(prompt, weights)(proposer.rows, True))


def random_masses(seed, heads=HEADS, rows=6, k=6, focus=1.0):
    """Rows that share their mass over ``k`` chunks of one token each and a sink, with heads of very different size."""
    rng = np.random.default_rng(seed)
    parts = rng.dirichlet(np.full(k + 1, focus), size=(heads, rows))
    masses = parts[..., :k] * rng.uniform(0, 1, (heads, 1, 1)) ** 4
    return RowMasses(torch.from_numpy(masses), torch.from_numpy(masses.mean(axis=1)).float())


def one_token_chunks(k=6, suffix=12):
    prompt = layout((1,) * k, suffix=suffix, sinks=0)
    return prompt, torch.tensor([start for start, _ in prompt.chunk_spans])


@pytest.mark.parametrize(
    ("suffix", "most", "expected"), [(40, 16, 16), (20, 16, 10), (3, 16, 1), (2, 16, 1), (1, 5, 1)]
)
def test_proposal_rows_are_the_last_of_the_suffix_and_at_most_half_of_it(suffix, most, expected):
    rows = proposal_rows((100, 100 + suffix), most)
    assert rows.tolist() == list(range(100 + suffix - expected, 100 + suffix))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.3, 1.0]), st.sampled_from([0.02, 0.3, 1.0]))
def test_the_envelope_is_never_below_what_a_head_or_row_discards(seed, focus, zeta):
    prompt, places = one_token_chunks()
    read = random_masses(seed, focus=focus)
    tokens = torch.zeros(HEADS, prompt.n_tokens)
    tokens[:, places] = read.tokens
    proposer = Proposer(pruning(**LENIENT, zeta=zeta, tau=0.1), prompt, GROUPS)
    proposal = proposer.propose(1, RowMasses(read.chunks, tokens))
    trial = proposal.trial
    if trial.verdict.code != PROPOSED:
        return
    lost = proposal.masses[..., list(trial.removed)].sum(axis=-1).max(axis=1)
    assert np.allclose(trial.max_discarded_per_head, lost, rtol=1e-8)
    assert (lost <= np.array(trial.envelope_per_head) * (1 + 1e-8)).all()
    assert (np.array(trial.envelope_per_head) <= trial.envelope * (1 + 1e-8)).all()


def test_the_envelope_is_attained_by_a_head_on_the_floor_that_loses_in_one_row_only():
    prompt, places = one_token_chunks(k=2, suffix=16)
    rows, zeta = 8, 0.2
    masses = torch.zeros(4, rows, 2, dtype=torch.float64)
    masses[:, :, 1] = 0.5
    masses[1] = 0.0
    masses[1, 3, 0] = 0.2
    tokens = torch.zeros(4, prompt.n_tokens)
    tokens[:, places] = masses.mean(dim=1).float()
    config = pruning(**{**LENIENT, "mu_min": 0.05}, zeta=zeta, target_saving=0.5)
    trial = Proposer(config, prompt, 2).propose(1, RowMasses(masses, tokens)).trial
    assert trial.removed == (0,)
    assert trial.head_weights[1] == pytest.approx(zeta / 2)
    assert trial.pooled_discarded == pytest.approx(0.5 * zeta / 2 * 0.2 / rows)
    assert trial.max_discarded == pytest.approx(0.2)
    assert trial.envelope == pytest.approx(0.2)
    assert trial.envelope_per_head[1] == pytest.approx(0.2)


def test_the_least_attended_chunks_go_until_the_target_is_reached():
    prompt = layout()
    weights = attention(prompt, [0.02, 0.2, 0.01, 0.2, 0.03, 0.04], jitter=0.5)
    trial = propose(pruning(target_saving=0.5), prompt, weights).trial
    assert trial.verdict.code == PROPOSED
    assert trial.layer == 7
    assert trial.removed == (0, 2, 4)
    assert trial.stopped == "target"
    assert trial.tokens_saved == 30
    assert trial.saved_share == 0.5
    assert trial.doc_mass == pytest.approx(0.5, rel=1e-5)
    assert trial.pooled_mass == pytest.approx((0.02, 0.2, 0.01, 0.2, 0.03, 0.04), rel=1e-5)
    assert trial.max_discarded == pytest.approx(0.06, rel=1e-5)
    assert trial.cap_slack == pytest.approx(0.24, rel=1e-5)
    assert sorted(range(6), key=lambda i: trial.scores[i])[:3] == [2, 0, 4]


def test_the_exact_solver_is_used_on_request():
    prompt = layout()
    weights = attention(prompt, [0.02, 0.2, 0.01, 0.2, 0.03, 0.04])
    trial = propose(pruning(solver="exact"), prompt, weights).trial
    assert trial.removed == (0, 2, 4)
    assert trial.solver == "exact"


def test_protected_chunks_are_never_proposed():
    prompt = layout(protected=(2, 4))
    weights = attention(prompt, [0.02, 0.2, 0.01, 0.2, 0.03, 0.04])
    trial = propose(pruning(), prompt, weights).trial
    assert trial.removed == (0, 3, 5)


def test_shares_of_tokens_are_not_rounded_up_by_floating_point():
    prompt = layout((10,) * 10)
    weights = attention(prompt, [0.05] * 10)
    for share, chunks in ((0.1, 1), (0.3, 3), (0.7, 7)):
        config = pruning(min_saving=share, target_saving=share, max_saving=share, eps_row=0.9)
        trial = propose(config, prompt, weights).trial
        assert trial.verdict.code == PROPOSED
        assert len(trial.removed) == chunks


def test_eps_row_per_row_counts_from_the_end_of_the_prompt():
    prompt = layout()
    last = prompt.n_tokens - 1
    low = [0.01, 0.2, 0.01, 0.2, 0.01, 0.2]
    weights = attention(prompt, low, rows={last: [0.2, 0.2, 0.2, 0.2, 0.05, 0.1]})
    assert propose(pruning(eps_row=(0.1, 0.3)), prompt, weights).trial.removed == (4,)
    assert propose(pruning(eps_row=(0.9, 0.3)), prompt, weights).trial.removed == (0, 2, 4)


def test_a_layer_that_looks_at_sinks_only_proposes_nothing_though_it_would_lose_nothing():
    prompt = layout()
    trial = propose(pruning(), prompt, attention(prompt, [0.002] * 6)).trial
    assert trial.verdict.code == "no_document_mass"
    assert trial.removed == ()
    assert trial.doc_mass == pytest.approx(0.012, rel=1e-4)
    assert "mass_min" in trial.verdict.message


def test_a_layer_without_an_eligible_head_proposes_nothing():
    prompt = layout()
    trial = propose(pruning(mu_min=0.4), prompt, attention(prompt, [0.05] * 6)).trial
    assert trial.verdict.code == "no_eligible_heads"
    assert (trial.eligible_heads, trial.fallback_groups) == (0, GROUPS)


def test_caps_too_tight_for_any_chunk_leave_nothing():
    prompt = layout()
    trial = propose(pruning(eps_row=0.1), prompt, attention(prompt, [0.15] * 6)).trial
    assert trial.verdict.code == "caps_leave_nothing"
    assert trial.pooled_mass
    assert trial.tokens_saved == 0
    assert trial.max_discarded == 0.0


def test_a_set_below_the_least_saving_is_no_proposal():
    prompt = layout()
    trial = propose(pruning(eps_row=0.1, min_saving=0.3), prompt, attention(prompt, [0.15] * 5 + [0.05])).trial
    assert trial.verdict.code == "below_min_saving"
    assert trial.removed == (5,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_attention_that_is_no_number_is_rejected_and_leaves_no_such_number_in_the_trial(bad):
    prompt = layout()
    weights = attention(prompt, [0.1] * 6)
    weights[1, -1, 20] = bad
    proposal = propose(pruning(), prompt, weights)
    assert proposal.trial.verdict.code == "not_finite"
    assert proposal.problem is None
    assert LayerTrial.model_validate_json(proposal.trial.model_dump_json()) == proposal.trial


def test_the_paper_region_for_entropies_can_be_chosen():
    prompt = layout()
    weights = attention(prompt, [0.05] * 6)
    delimiter = prompt.chunk_spans[0][1]
    weights[0, -6:, delimiter] = weights[0, -6:, 0]
    weights[0, -6:, 0] = 0.0
    ours = propose(pruning(entropy_over="documents"), prompt, weights).trial
    paper = propose(pruning(entropy_over="outside_sinks"), prompt, weights).trial
    assert paper.head_weights[0] > 0.8
    assert ours.head_weights[0] == pytest.approx(0.5)


def test_a_bad_weighting_is_a_configuration_error():
    prompt = layout()
    with pytest.raises(ConfigError, match="head_weights"):
        propose(pruning(head_weights=lambda h, e: -np.ones_like(h)), prompt, attention(prompt, [0.1] * 6))


def test_relative_caps_hold_for_the_heads_that_look_at_documents():
    prompt = layout()
    weights = attention(prompt, [0.05] * 6)
    trial = propose(pruning(rho=0.4), prompt, weights).trial
    assert len(trial.removed) == 2
    assert trial.max_discarded <= 0.4 * 0.3


@pytest.mark.parametrize(
    ("prompt", "config", "code"),
    [
        (layout(()), {}, "no_chunks"),
        (layout((10, 10), protected=(0, 1)), {"m0": 1}, "nothing_removable"),
        (layout((10, 10)), {"m0": 2}, "too_few_chunks"),
        (layout((10, 10)), {"m0": 50}, "too_few_chunks"),
        (layout((90, 5, 5), protected=(0,)), {"min_saving": 0.3}, "saving_out_of_reach"),
        (layout((90, 5), protected=(1,)), {"m0": 1}, "saving_out_of_reach"),
    ],
)
def test_what_no_attention_could_change_is_known_beforehand(prompt, config, code):
    reason = Proposer(pruning(**config), prompt, GROUPS).why_not()
    assert reason.code == code


def test_a_prompt_with_something_to_gain_may_be_pruned():
    assert Proposer(pruning(), layout(), GROUPS).why_not() is None


def test_chunks_without_tokens_propose_nothing():
    prompt = layout((0, 0, 0))
    config = pruning(mass_min=0.0, entropy_over="outside_sinks", mu_min=0.01, min_saving=0.0)
    weights = torch.full((HEADS, prompt.n_tokens, prompt.n_tokens), 1 / prompt.n_tokens)
    assert propose(config, prompt, weights).trial.verdict.code == "caps_leave_nothing"


def test_masses_without_the_mean_row_are_refused():
    prompt = layout()
    proposer = Proposer(pruning(), prompt, GROUPS)
    masses = Reader(prompt, attention(prompt, [0.1] * 6))(proposer.rows, False)
    with pytest.raises(ValueError, match="tokens"):
        proposer.propose(1, masses)
