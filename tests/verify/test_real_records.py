"""SmolLM2 with the default configuration: what it records follows from itself, and comes out again."""

import pytest

from entroprefill_rag import Chunk, LocalBackend, PruningConfig, RagRequest
from entroprefill_rag.verify import check, replay

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_records_of_real_questions_follow_and_come_out_again(smollm2, smoke_questions):
    model, tokenizer = smollm2
    shortest = sorted(smoke_questions, key=lambda record: sum(len(chunk["text"]) for chunk in record["chunks"]))[:4]
    outcomes = []
    with LocalBackend(model, tokenizer, name="smollm2-135m", ledger=False) as backend:
        for record in shortest:
            request = RagRequest(chunks=[Chunk(**chunk) for chunk in record["chunks"]], query=record["question"])
            audit = backend.generate(request, PruningConfig(), max_new_tokens=4, do_sample=False).audit
            outcomes.append(audit.outcome)
            assert check(audit) == []
            assert replay(audit, request, backend) == []
    assert set(outcomes) <= {"pruned", "bypassed"}
