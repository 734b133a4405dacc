"""The cache that llmlingua takes apart and puts together again is the model's own."""

import pytest
import torch

from entroprefill_rag.bench.compressor import Compressor, PairsOfKeysAndValues
from entroprefill_rag.errors import ConfigError


def test_a_prompt_in_two_pieces_gives_the_logits_of_the_whole(backend):
    model = PairsOfKeysAndValues(backend.model)
    ids = torch.arange(20, 32)[None]
    mask = torch.ones_like(ids)
    with torch.no_grad():
        whole = backend.model(input_ids=ids).logits
        first = model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=None, use_cache=True)
        assert first.past_key_values[0][0].shape[2] == 5
        pairs = [(keys.clone(), values.clone()) for keys, values in first.past_key_values]
        second = model(ids[:, 5:], attention_mask=mask, past_key_values=pairs, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), whole)


def test_without_the_package_the_way_out_is_told(backend, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llmlingua", None)
    with pytest.raises(ConfigError, match="pip install llmlingua"):
        Compressor(backend.model, backend.tokenizer, 0.5)


@pytest.mark.slow
@pytest.mark.model
def test_about_as_much_stays_as_was_asked_for(smollm2, smoke_questions):
    pytest.importorskip("llmlingua")
    from entroprefill_rag.bench.questions import Question
    from entroprefill_rag.request import Chunk

    model, tokenizer = smollm2
    told = smoke_questions[0]
    chunks = tuple(Chunk(id=part["id"], title=part["title"], text=part["text"]) for part in told["chunks"][:4])
    question = Question("q", "red", told["question"], (), chunks, frozenset(), "none")
    (chunk,) = Compressor(model, tokenizer, 0.5).request(question).chunks
    before = sum(len(tokenizer(f"{one.title}\n{one.text}")["input_ids"]) for one in chunks)
    after = len(tokenizer(chunk.text)["input_ids"])
    assert 0.3 * before < after < 0.7 * before
