"""Text pieces: together they are the answer, and no piece holds half a character."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from entroprefill_rag.engine.streaming import TextEmitter

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
raw = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
raw.decoder = decoders.ByteLevel()
BYTES = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=None)


def decode(ids):
    return BYTES.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def run(ids, also=None):
    pieces, firsts = [], []
    emitter = TextEmitter(decode, pieces.append, lambda: firsts.append(len(pieces)), also=also)
    emitter.put(torch.tensor([[1, 2, 3]]))
    for token in ids:
        emitter.put(torch.tensor([token]))
    emitter.end()
    return pieces, firsts


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40))
def test_pieces_joined_are_the_text(text):
    ids = BYTES(text, add_special_tokens=False)["input_ids"]
    pieces, firsts = run(ids)
    assert "".join(pieces) == decode(ids)
    assert firsts == [0]


def test_a_character_of_several_tokens_comes_whole():
    pieces, _ = run(BYTES("a😀ü", add_special_tokens=False)["input_ids"])
    assert pieces == ["a", "😀", "ü"]


def test_an_unfinished_character_comes_at_the_end():
    ids = BYTES("x😀", add_special_tokens=False)["input_ids"][:-1]
    pieces, _ = run(ids)
    assert "".join(pieces) == decode(ids)


def test_the_outcome_is_announced_even_without_a_token():
    pieces, firsts = run([])
    assert pieces == []
    assert firsts == [0]


@pytest.mark.parametrize("count", [0, 3])
def test_the_callers_streamer_gets_prompt_tokens_and_end(count):
    seen = []

    class Mine:
        def put(self, value):
            seen.append(value.tolist())

        def end(self):
            seen.append("end")

    run([5] * count, also=Mine())
    assert seen == [[[1, 2, 3]], *[[5]] * count, "end"]
