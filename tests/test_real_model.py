"""SmolLM2 on real questions, end to end."""

import pytest

from entroprefill_rag import AuditRecord, Chunk, LocalBackend, PruningConfig, RagRequest

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def backend(smollm2):
    model, tokenizer = smollm2
    with LocalBackend(model, tokenizer, name="smollm2-135m") as made:
        yield made


def asked(record):
    return RagRequest(chunks=[Chunk(**chunk) for chunk in record["chunks"]], query=record["question"])


def test_every_smoke_question_is_answered_pruned_and_unpruned(backend, smoke_questions):
    pruned = 0
    for record in smoke_questions:
        full = backend.generate(asked(record), PruningConfig(enabled=False), max_new_tokens=4, do_sample=False)
        result = backend.generate(asked(record), PruningConfig(), max_new_tokens=4, do_sample=False)
        assert full.audit.outcome == "off"
        assert full.retained_ids == tuple(chunk["id"] for chunk in record["chunks"])
        assert result.usage.prompt_tokens == full.usage.prompt_tokens
        assert AuditRecord.from_json(result.audit.to_json()) == result.audit
        if result.pruned:
            pruned += 1
            trial = result.audit.trial
            assert trial.max_discarded <= 0.2
            assert all(audit.accepted for audit in trial.audits)
            assert 0 < result.usage.kept_tokens < result.usage.prompt_tokens
            assert trial.dual.bound >= trial.tokens_saved
            assert trial.max_discarded <= trial.envelope + 1e-6
        else:
            assert result.answer == full.answer
    # What is accepted is a matter of the audit's draws; that hardly anything is would be a matter of the defaults.
    assert pruned >= len(smoke_questions) // 3


def test_an_unpruned_answer_is_that_of_plain_transformers(smollm2, smoke_questions):
    import torch

    model, tokenizer = smollm2
    record = min(smoke_questions, key=lambda record: sum(len(chunk["text"]) for chunk in record["chunks"]))
    with LocalBackend(model, tokenizer) as made:
        layout = made.layout(asked(record))
        answer = made.generate(asked(record), PruningConfig(enabled=False), max_new_tokens=12, do_sample=False).answer
    ids = torch.tensor([layout.input_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert answer == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
