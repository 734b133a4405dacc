"""What an audit looks at is fixed by seed, prompt and distribution, and by nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from entroprefill_rag.config import Observer, ProbeQueries, PromptRows, SuffixRows, WeightedRows
from entroprefill_rag.errors import ConfigError, RequestError
from entroprefill_rag.rule.observers import AuditPlan, plan_audits, retained_share, support_of

BLOCK, SUFFIX = (20, 620), (620, 650)


def plan(
    *observers: Observer,
    m_a: int = 64,
    method: str = "auto",
    seed: int = 7,
    prompt_hash: str = "ab",
    block: tuple[int, int] = BLOCK,
    suffix: tuple[int, int] = SUFFIX,
    delta: float = 0.05,
) -> tuple[AuditPlan, ...]:
    return plan_audits(
        observers,
        document_block=block,
        suffix=suffix,
        m_a=m_a,
        delta=delta,
        method=method,
        seed=seed,
        prompt_hash=prompt_hash,
    )


def test_a_small_support_is_enumerated_and_a_large_one_sampled() -> None:
    suffix, prompt = plan(SuffixRows(), PromptRows())

    assert suffix.method == "enumerate"
    assert suffix.rows.tolist() == list(range(620, 650))
    assert suffix.support == suffix.m == 30
    assert suffix.weights is None
    assert not suffix.prompt_rows
    assert prompt.method == "sample"
    assert prompt.support == 630
    assert prompt.m == 64
    assert prompt.prompt_rows
    assert prompt.rows.dtype == torch.int64


def test_a_support_as_large_as_m_a_is_enumerated_and_one_row_more_is_sampled() -> None:
    assert plan(SuffixRows(), m_a=30)[0].method == "enumerate"
    assert plan(SuffixRows(), m_a=29)[0].method == "sample"


def test_delta_is_split_over_the_sampled_distributions_only() -> None:
    enumerated, prompt, weighted = plan(SuffixRows(), PromptRows(), WeightedRows(), m_a=30, delta=0.04)
    assert (enumerated.delta, prompt.delta, weighted.delta) == (None, 0.04, None)

    shares = [audit.delta for audit in plan(SuffixRows(), PromptRows(), WeightedRows(), method="sample", delta=0.06)]
    assert shares == pytest.approx([0.02, 0.02, 0.02])


def test_enumeration_on_request_reads_every_row_of_the_prompt() -> None:
    (audit,) = plan(PromptRows(), method="enumerate", m_a=2)
    assert audit.rows.tolist() == list(range(20, 650))
    assert audit.delta is None


def test_rows_between_the_documents_and_the_suffix_are_in_no_support() -> None:
    (audit,) = plan(PromptRows(), method="enumerate", block=(5, 8), suffix=(10, 12))
    assert audit.rows.tolist() == [5, 6, 7, 10, 11]


def test_a_support_of_one_row_can_be_told() -> None:
    assert plan(SuffixRows(), suffix=(620, 621))[0].support == 1


def test_weighted_rows_fall_geometrically_away_from_the_end() -> None:
    (audit,) = plan(WeightedRows(decay=0.5), suffix=(620, 624))
    assert audit.weights is not None
    assert audit.weights.dtype == torch.float64
    assert audit.weights.tolist() == pytest.approx([1 / 15, 2 / 15, 4 / 15, 8 / 15])


def test_draws_of_weighted_rows_are_not_weighted_again() -> None:
    assert plan(WeightedRows(decay=0.5), method="sample")[0].weights is None


def bank(size: int) -> ProbeQueries:
    return ProbeQueries(queries=tuple(f"question {i}" for i in range(size)))


def test_a_bank_no_larger_than_m_a_is_enumerated() -> None:
    (audit,) = plan(bank(64))
    assert (audit.method, audit.support, audit.delta, audit.weights) == ("enumerate", 64, None, None)
    assert audit.rows.tolist() == list(range(64))
    assert audit.probes
    assert not audit.prompt_rows


def test_a_larger_bank_is_drawn_from_uniformly_with_replacement() -> None:
    (audit,) = plan(bank(65))
    assert (audit.method, audit.support, audit.m, audit.delta) == ("sample", 65, 64, 0.05)
    (many,) = plan(bank(20), method="sample", m_a=20_000)
    assert chisquare(np.bincount(many.rows.numpy(), minlength=20)).pvalue > 1e-4
    assert len(many.rows.unique()) == 20


def test_probes_have_a_stream_of_their_own_and_depend_on_no_range_of_the_prompt() -> None:
    (probes,) = plan(bank(30), method="sample")
    (suffix,) = plan(SuffixRows(), method="sample")
    assert probes.support == suffix.support
    assert not torch.equal(probes.rows, suffix.rows - 620)
    assert torch.equal(probes.rows, plan(bank(30), method="sample", suffix=(700, 710))[0].rows)


def test_probes_have_no_retained_share() -> None:
    assert retained_share(plan(bank(30))[0], 300) is None


def test_only_weighted_rows_have_a_decay_sampled_or_not() -> None:
    for method in ("sample", "enumerate"):
        plans = plan(SuffixRows(), WeightedRows(decay=0.7), PromptRows(), bank(5), method=method)
        assert [audit.decay for audit in plans] == [None, 0.7, None, None]


def test_the_same_seed_and_prompt_give_the_same_draws() -> None:
    first, again = plan(PromptRows()), plan(PromptRows())
    assert torch.equal(first[0].rows, again[0].rows)


@pytest.mark.parametrize("changed", [{"seed": 8}, {"prompt_hash": "ac"}, {"seed": 7 + 2**64}, {"seed": 2**128 + 7}])
def test_another_seed_or_prompt_gives_other_draws(changed: dict[str, int | str]) -> None:
    assert not torch.equal(plan(PromptRows())[0].rows, plan(PromptRows(), **changed)[0].rows)  # type: ignore[arg-type]


def test_draws_do_not_depend_on_which_other_distributions_are_asked_for() -> None:
    alone = plan(PromptRows(), method="sample")[0]
    beside = plan(SuffixRows(), PromptRows(), method="sample")[1]
    assert torch.equal(alone.rows, beside.rows)


def test_kinds_have_streams_of_their_own() -> None:
    suffix, weighted = plan(SuffixRows(), WeightedRows(decay=1.0), method="sample")
    assert suffix.support == weighted.support
    assert not torch.equal(suffix.rows, weighted.rows)


def test_no_global_generator_is_read_or_moved() -> None:
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
    before = plan(PromptRows())[0].rows
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])
    torch.rand(3)
    random.random()
    assert torch.equal(before, plan(PromptRows())[0].rows)


def test_draws_are_uniform_over_the_support() -> None:
    (audit,) = plan(SuffixRows(), method="sample", m_a=30_000)
    counts = np.bincount(audit.rows.numpy() - 620, minlength=30)
    assert chisquare(counts).pvalue > 1e-4


def test_draws_follow_the_weights() -> None:
    (audit,) = plan(WeightedRows(decay=0.7), method="sample", m_a=30_000, suffix=(620, 628))
    _, weights = support_of(WeightedRows(decay=0.7), document_block=BLOCK, suffix=(620, 628))
    assert weights is not None
    counts = np.bincount(audit.rows.numpy() - 620, minlength=8)
    assert chisquare(counts, 30_000 * weights).pvalue > 1e-4
    assert chisquare(counts).pvalue < 1e-9, "a uniform draw must be told apart"


def test_neighbouring_draws_are_independent() -> None:
    rows = plan(SuffixRows(), method="sample", m_a=40_000, suffix=(620, 624))[0].rows.numpy() - 620
    pairs = np.bincount(4 * rows[0::2] + rows[1::2], minlength=16)
    assert chisquare(pairs).pvalue > 1e-4


def test_draws_repeat_rows() -> None:
    (audit,) = plan(SuffixRows(), method="sample", m_a=200)
    assert len(audit.rows.unique()) < audit.m


@given(
    seed=st.integers(0, 2**130),
    start=st.integers(0, 50),
    documents=st.integers(0, 300),
    gap=st.integers(0, 5),
    suffix=st.integers(1, 80),
    m_a=st.integers(1, 100),
    method=st.sampled_from(["auto", "enumerate", "sample"]),
)
def test_every_row_lies_in_its_support(
    seed: int, start: int, documents: int, gap: int, suffix: int, m_a: int, method: str
) -> None:
    end = start + documents
    audits = plan(
        SuffixRows(),
        WeightedRows(),
        PromptRows(),
        seed=seed,
        block=(start, end),
        suffix=(end + gap, end + gap + suffix),
        m_a=m_a,
        method=method,
    )
    for audit in audits:
        rows = set(audit.rows.tolist())
        allowed = set(range(end + gap, end + gap + suffix)) | (set(range(start, end)) if audit.prompt_rows else set())
        assert rows <= allowed
        assert audit.support == len(allowed)
        if audit.method == "enumerate":
            assert rows == allowed
            assert audit.weights is None or float(audit.weights.sum()) == pytest.approx(1.0)
        else:
            assert audit.m == m_a
    spent = [audit.delta for audit in audits if audit.delta is not None]
    assert sum(spent) == pytest.approx(0.05 if spent else 0.0)


def test_the_retained_share_counts_removed_rows_of_the_prompt_only() -> None:
    suffix, prompt = plan(SuffixRows(), PromptRows())
    assert retained_share(suffix, 300) is None
    assert retained_share(prompt, 315) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"method": "peek"}, ConfigError, "peek"),
        ({"m_a": 0}, ConfigError, "m_a"),
        ({"delta": 0.0}, ConfigError, "delta"),
        ({"delta": 1.0}, ConfigError, "delta"),
        ({"seed": -1}, ConfigError, "seed"),
        ({"suffix": (620, 620)}, RequestError, "suffix"),
        ({"suffix": (600, 650)}, RequestError, "suffix"),
        ({"block": (30, 20)}, RequestError, "document block"),
    ],
)
def test_what_is_no_audit_is_refused(wrong: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        plan(SuffixRows(), **wrong)  # type: ignore[arg-type]
