"""What a record claims in words: for which attempts, with which probability, and what a replay or a given seed mean."""

import pytest

from entroprefill_rag.claims import describe
from entroprefill_rag.record import AuditResult, AuditSetup, ChunkInfo, LayerTrial, ObserverInfo, Reason

CHUNKS = tuple(ChunkInfo(id=f"c{i}", start=10 * i, end=10 * i + 10) for i in range(3))


def audit(method="sample"):
    return AuditResult(
        observer="prompt_rows",
        method=method,
        bound="betting",
        m=64,
        limit=0.2,
        level=0.001 if method == "sample" else None,
        eta_hat=(0.05,),
        upper=(0.1,),
        passed=(True,),
        accepted=True,
    )


def claims(*audits, seeded=False, replay=False, masses=(0.2, 0.2, 0.2), other=False, **setup):
    fixed = {"seed": 1, "delta": 0.05, "monitored_layers": 1, "query_heads": 1, "m_a": 64, "bound": "betting"}
    trial = LayerTrial(
        layer=4,
        doc_mass=0.5,
        eligible_heads=1,
        fallback_groups=0,
        head_weights=(1.0,),
        removed=(0,),
        pooled_mass=masses,
        audits=audits,
        verdict=Reason(code="accepted", message="."),
    )
    observer = ObserverInfo(kind="prompt_rows", support=1000, method="sample", rows=(1, 2, 2))
    made = AuditSetup(**{**fixed, "union": "layers", "observers": (observer,), **setup})
    return describe(trial, made, CHUNKS, 8, for_other_model=other, seeded=seeded, replay=replay)


def test_one_attempt_claims_for_itself_only():
    said = claims(audit(), attempt=3).probabilistic
    assert "at most 0.05." in said
    assert "this attempt only" in said
    assert "attempt 3 at this prompt" in said
    assert "as far as the ledger goes back" in said


def test_attempts_that_share_delta_claim_for_all_of_them():
    said = claims(audit(), attempt=3, attempts="all", delta=0.05 / 12).probabilistic
    assert "at most 0.00416667 in attempt 3 at this prompt" in said
    assert "at most 0.05 in all attempts at it together" in said
    assert "as far as the ledger goes back" in said
    assert "only" not in said


def test_without_a_ledger_the_record_says_that_none_was_kept():
    said = claims(audit()).probabilistic
    assert "no ledger was kept" in said
    assert "this attempt only" in said


@pytest.mark.parametrize("attempts", ["each", "all"])
def test_a_replay_claims_the_same_and_says_what_it_is(attempts):
    first, again = (claims(audit(), attempt=2, attempts=attempts, replay=replay) for replay in (False, True))
    assert again.model_copy(update={"warnings": ()}) == first
    [warning] = again.warnings
    assert warning.startswith("A replay")
    assert "attempt 2 at this prompt" in warning


def test_a_given_seed_guarantees_nothing_against_somebody_who_knows_it():
    [warning] = claims(audit(), seeded=True, attempt=1).warnings
    assert "guarantees nothing" in warning
    assert claims(audit(), attempt=1).warnings == ()


def test_an_enumerated_audit_is_exact_and_has_no_attempt_probability_or_seed_to_speak_of():
    said = claims(audit("enumerate"), attempt=3, seeded=True)
    assert said.probabilistic is None
    assert "exact mean" in said.exact
    assert said.warnings == ()


def test_exact_probabilistic_and_conditional_are_never_mixed():
    said = claims(audit(), audit("enumerate"), attempt=1)
    assert "robab" not in said.exact + said.conditional
    assert "xact" not in said.probabilistic + said.conditional
    assert "assumptions" not in said.exact + said.probabilistic


def test_a_chunk_that_draws_most_of_the_attention_is_pointed_out():
    [warning] = claims(audit(), attempt=1, masses=(0.1, 0.7, 0.1)).warnings
    assert "'c1' draws 78%" in warning


def test_for_another_model_nothing_is_claimed_of_its_answer():
    assert "Another model" in claims(audit(), attempt=1, other=True).conditional
