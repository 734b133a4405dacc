"""Rows of attention -> masses per chunk."""

import numpy as np
import pytest
import torch

from entroprefill_rag.rule.masses import (
    RowMasses,
    chunk_masses,
    chunk_membership,
    chunk_positions,
    discarded,
    document_mass,
    row_masses,
)

SPANS = ((2, 6), (7, 8), (8, 15))
N = 20


@pytest.fixture
def attention():
    generator = torch.Generator().manual_seed(7)
    return torch.softmax(4 * torch.randn(3, 5, N, generator=generator), dim=-1)


def test_a_chunks_mass_is_the_sum_over_its_tokens_outside_the_sinks(attention):
    masses = chunk_masses(attention, chunk_membership(SPANS, N, first=4))
    expected = torch.stack([attention[..., s:e].double().sum(-1) for s, e in ((4, 6), (7, 8), (8, 15))], dim=-1)
    assert masses.dtype == torch.float64
    assert masses.shape == (3, 5, 3)
    torch.testing.assert_close(masses, expected, rtol=1e-6, atol=1e-7)


def test_a_chunk_inside_the_sinks_has_no_mass(attention):
    assert chunk_masses(attention, chunk_membership(((0, 3),), N, first=4)).abs().max() == 0


def test_half_precision_rows_are_summed_in_float32():
    attention = torch.full((1, 1, 5000), 1 / 5000).half()
    mass = chunk_masses(attention, chunk_membership(((0, 5000),), 5000))
    assert mass.item() == pytest.approx(5000 * float(attention[0, 0, 0]), rel=1e-5)


def test_masses_stay_exact_where_the_process_allows_reduced_precision(attention):
    membership = chunk_membership(SPANS, N)
    try:
        torch.set_float32_matmul_precision("medium")
        masses = chunk_masses(attention, membership)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(masses, attention.double() @ membership.double())


def test_tokens_are_the_mean_over_the_rows_and_only_on_request(attention):
    membership = chunk_membership(SPANS, N)
    assert row_masses(attention, membership).tokens is None
    read = row_masses(attention, membership, want_tokens=True)
    assert isinstance(read, RowMasses)
    torch.testing.assert_close(read.tokens, attention.mean(dim=1))


def test_document_mass_is_the_mean_over_heads_and_rows_of_all_chunks(attention):
    masses = chunk_masses(attention, chunk_membership(SPANS, N))
    assert document_mass(masses) == pytest.approx(float(masses.sum(-1).mean()))
    assert document_mass(chunk_masses(attention, chunk_membership((), N))) == 0.0


def test_discarded_mass_adds_up_over_the_removed_chunks(attention):
    masses = chunk_masses(attention, chunk_membership(SPANS, N))
    torch.testing.assert_close(discarded(masses, (0, 2)), masses[..., 0] + masses[..., 2])
    assert discarded(masses, ()).abs().max() == 0
    assert discarded(masses, ()).shape == (3, 5)


def test_chunk_positions_name_the_tokens_of_the_membership_and_their_owner():
    positions, owner = chunk_positions(SPANS, first=4)
    membership = chunk_membership(SPANS, N, first=4)
    again = torch.zeros_like(membership)
    again[torch.from_numpy(positions), torch.from_numpy(owner)] = 1
    assert torch.equal(again, membership)
    assert len(positions) == int(membership.sum())
    assert (np.diff(positions) > 0).all()


def test_no_chunks_means_no_positions():
    positions, owner = chunk_positions((), first=4)
    assert len(positions) == len(owner) == 0
