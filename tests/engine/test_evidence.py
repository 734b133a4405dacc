"""Layers read only to rank chunks: what is read is the model's own attention, and nothing else changes."""

import pytest
import torch
from tiny import LOOSE, model, request, tokenizer

from entroprefill_rag import LocalBackend
from entroprefill_rag.config import HeadProfile

EVEN = (0.25,) * 4
PLAIN = LOOSE.model_copy(update={"head_weights": HeadProfile(name="plain", weights=((3, EVEN),)), "layers": (3,)})
RANKED = PLAIN.model_copy(
    update={
        "head_weights": HeadProfile(name="ranked", weights=((3, EVEN),), pooled=((3, ((1, 2, 0.5), (3, 0, 0.5))),)),
    }
)


@pytest.fixture(scope="module")
def backend():
    with LocalBackend(model(), tokenizer(), name="tiny", ledger=False) as made:
        yield made


def test_what_ranks_the_chunks_is_what_the_model_attends_to(backend):
    record = backend.generate(request(), RANKED, max_new_tokens=2, do_sample=False).audit
    layout = backend.layout(request(), RANKED)
    with torch.no_grad():
        seen = model("eager")(torch.tensor([layout.input_ids]), output_attentions=True).attentions
    spans, query = layout.chunk_spans, layout.query_span
    assert query == record.prompt.query_span
    assert tokenizer().decode(layout.input_ids[slice(*query)]).strip() == request().query
    assert query[0] > layout.suffix_span[0], "words before the question"
    expected = torch.zeros(len(spans))
    for layer, head in ((1, 2), (3, 0)):
        attention = seen[layer][0, head]
        asked, before = (attention[start:end].mean(dim=0) for start, end in (query, (layout.suffix_span[0], query[0])))
        question, habit = (
            torch.stack([row[max(start, layout.sink_tokens) : end].sum() for start, end in spans])
            for row in (asked, before)
        )
        expected += 0.5 * (question - habit) / question.sum()
    assert record.trials[0].evidence == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)
    assert [trial.layer for trial in record.trials] == [3]
    assert record.layers == (3,)


def test_without_evidence_of_other_layers_none_is_read_or_recorded(backend):
    for config in (PLAIN, RANKED.model_copy(update={"evidence": "layer"})):
        record = backend.generate(request(), config, max_new_tokens=2, do_sample=False).audit
        assert record.trials[0].evidence == ()


def test_the_ranking_changes_no_mass_that_caps_and_audit_look_at(backend):
    plain, ranked = (
        backend.generate(request(), config, max_new_tokens=2, do_sample=False).audit.trials[0]
        for config in (PLAIN, RANKED)
    )
    assert ranked.pooled_mass == plain.pooled_mass
    assert ranked.head_weights == plain.head_weights
    assert ranked.doc_mass == plain.doc_mass


def test_a_window_too_short_for_a_ranking_layer_leaves_the_layer_to_its_own_heads():
    from profile_cases import profile

    from entroprefill_rag import PruningConfig
    from entroprefill_rag.calibration.profile import settle

    known = profile(pooled=((2, ((1, 0, 1.0),)), (3, ((3, 1, 1.0),))))
    found = settle(PruningConfig(), known, (2, 3, 4)).head_weights
    assert [layer for layer, _ in found.pooled] == [3]
    found = settle(PruningConfig(), known, (1, 2, 3, 4)).head_weights
    assert [layer for layer, _ in found.pooled] == [2, 3]
