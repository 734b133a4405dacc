"""What a user wrote stays text, whatever the tokenizer, and pieces of a text put together are that text."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers_for_tests import KINDS, SPELLED, byte_level, gemma_like, llama_like, slow, unigram, words

from entroprefill_rag.engine.segments import LONE_SURROGATE, Control, SegmentTokenizer
from entroprefill_rag.errors import ConfigError

SEGMENTS = {name: SegmentTokenizer(make()) for name, make in KINDS.items()}
kinds = pytest.mark.parametrize("kind", list(KINDS))
# With surrogates, which `st.text()` alone leaves out.
any_text = st.text(alphabet=st.characters(), max_size=40)
texts = st.lists(st.one_of(any_text, st.sampled_from([*SPELLED, "<0x41>", "▁", " ", "\n\n", "  "])), max_size=6)


def encode(segments, text, continues=True):
    (clean,) = segments.clean([text])
    (ids,) = segments.encode([clean.text], [continues])
    return clean.text, ids


def as_spaces(text):
    return text.replace("▁", " ")


@kinds
@pytest.mark.parametrize("spelled", SPELLED)
def test_text_that_spells_a_special_token_stays_text(kind, spelled):
    segments = SEGMENTS[kind]
    for text in (spelled, f"x{spelled}y", f" {spelled} {spelled}", spelled * 3):
        cleaned, ids = encode(segments, text)
        assert segments.forbidden.isdisjoint(ids)
        assert as_spaces(segments.decode(ids)).lstrip() == as_spaces(cleaned).lstrip()


@pytest.mark.parametrize("make", [byte_level, gemma_like, llama_like, unigram, slow])
def test_those_texts_do_reach_special_tokens_without_the_layout(make):
    tokenizer = make()
    spelled = "".join(SPELLED)
    assert SegmentTokenizer(tokenizer).forbidden.intersection(tokenizer.encode(spelled, add_special_tokens=False))


@pytest.mark.parametrize("text", ["<think>", "<tool_call>"])
def test_added_tokens_that_are_not_marked_special_do_not_come_out_of_text_either(text):
    tokenizer = byte_level()
    assert tokenizer.convert_tokens_to_ids(text) in tokenizer.encode(text, split_special_tokens=True)
    segments = SegmentTokenizer(tokenizer)
    assert tokenizer.convert_tokens_to_ids(text) not in encode(segments, text)[1]


@kinds
@settings(max_examples=40, deadline=None)
@given(pieces=texts)
@example(pieces=["a", "", "\n", "</s>", "\ud800", "\U0001f600"])
@example(pieces=[" a", "  b", "\n\n", "\n", " "])
def test_pieces_encoded_one_by_one_are_the_text_again(kind, pieces):
    segments = SEGMENTS[kind]
    cleaned = [clean.text for clean in segments.clean(pieces)]
    rows = segments.encode(cleaned, [index > 0 for index in range(len(cleaned))])
    ids = [token for row in rows for token in row]
    assert segments.forbidden.isdisjoint(ids)
    assert as_spaces(segments.decode(ids)).lstrip() == as_spaces("".join(cleaned)).lstrip()


@kinds
def test_a_piece_that_continues_a_text_gets_no_space_of_its_own(kind):
    segments = SEGMENTS[kind]
    rows = segments.encode(["the do", "g ran", " far"], [False, True, True])
    assert segments.decode([token for row in rows for token in row]) == "the dog ran far"


@pytest.mark.parametrize("make", [byte_level, gemma_like, llama_like, unigram])
def test_a_text_that_begins_a_prompt_has_the_tokens_that_the_tokenizer_gives_it(make):
    tokenizer = make()
    text = "The cat sat on the mat. A dog ran"
    assert encode(SegmentTokenizer(tokenizer), text, False)[1] == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["byte-level, bytes dropped", "byte-level, bytes unknown"])
def test_characters_without_a_token_are_replaced_and_counted(kind):
    (clean,) = SEGMENTS[kind].clean(["a\x04b\x04c\x1dd"])
    assert clean.text == "a\ufffdb\ufffdc d"
    assert clean.replaced == {"\x04": 2, "\x1d": 1}


@kinds
def test_lone_surrogates_are_replaced_and_pairs_are_joined(kind):
    segments = SEGMENTS[kind]
    clean, paired, plain = segments.clean(["x\ud83dy\udc00", "\ud83d\ude00 \ufffd", "the cat"])
    assert clean.text == f"x{segments.substitute}y{segments.substitute}"
    assert clean.replaced[LONE_SURROGATE] == 2
    assert LONE_SURROGATE not in paired.replaced
    assert plain.text == "the cat"
    assert not plain.replaced


def test_a_tokenizer_that_knows_few_words_gets_nothing_unknown():
    segments = SegmentTokenizer(words())
    _, ids = encode(segments, "the cat!\nsat ? somewhere a")
    assert segments.forbidden.isdisjoint(ids)
    assert ids


def test_names_of_bytes_stay_text():
    assert unigram().decode(unigram().encode("<0x41>", add_special_tokens=False)).strip() == "A"
    segments = SEGMENTS["unigram"]
    assert segments.decode(encode(segments, "x<0x41>y")[1]) == "x<0x41>y"


def test_words_added_to_a_vocabulary_keep_their_ids():
    tokenizer = byte_level()
    tokenizer.add_tokens(["Zanzibar", AddedToken("  ", normalized=False)])
    _, ids = encode(SegmentTokenizer(tokenizer), "xZanzibar  y")
    assert tokenizer.convert_tokens_to_ids("Zanzibar") in ids
    assert ids == tokenizer.encode("xZanzibar  y", add_special_tokens=False)


def test_control_tokens_of_a_template_are_found_longest_first():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<bos>>", special=True), AddedToken("<end>", special=True, rstrip=True)])
    number = tokenizer.convert_tokens_to_ids
    assert SegmentTokenizer(tokenizer).split_controls("a<bos>><bos>b<end> \nc") == [
        "a",
        Control(number("<bos>>"), "<bos>>"),
        Control(number("<bos>"), "<bos>"),
        "b",
        Control(number("<end>"), "<end> \n"),
        "c",
    ]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (byte_level, ()),
        (lambda: byte_level(bos=True), ("<bos>",)),
        (llama_like, ("<s>",)),
        (gemma_like, ("<bos>",)),
        (slow, ()),
    ],
)
def test_what_the_tokenizer_puts_before_a_text_is_known(make, expected):
    tokenizer = make()
    assert tuple(tokenizer.convert_ids_to_tokens(list(SegmentTokenizer(tokenizer).bos))) == expected


def test_state_that_calls_leave_on_the_tokenizer_has_no_effect_and_is_left_alone():
    tokenizer = byte_level()
    before = encode(SegmentTokenizer(tokenizer), "The cat sat on the mat.")
    tokenizer("The cat sat on the mat.", truncation=True, max_length=2, padding="max_length", split_special_tokens=True)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=30)
    state = tokenizer.backend_tokenizer.to_str()
    assert encode(SegmentTokenizer(tokenizer), "The cat sat on the mat.") == before
    assert tokenizer.backend_tokenizer.to_str() == state


def test_threads_get_what_one_thread_gets_while_others_use_the_tokenizer():
    tokenizer = byte_level()
    segments = SegmentTokenizer(tokenizer)
    inputs = [f"{'</s> <|im_end|> é日 ' * (index % 7)}the cat {index}" for index in range(60)]
    alone = [encode(SegmentTokenizer(byte_level()), text) for text in inputs]
    done = threading.Event()

    def disturb():
        while not done.is_set():
            tokenizer("a b c", truncation=True, max_length=1, split_special_tokens=False)

    with ThreadPoolExecutor(5) as pool:
        disturbance = pool.submit(disturb)
        try:
            assert list(pool.map(lambda text: encode(segments, text), inputs)) == alone
        finally:
            done.set()
        disturbance.result()


def test_a_tokenizer_that_does_not_say_what_is_special_is_refused():
    class Opaque:
        @property
        def added_tokens_decoder(self):
            raise NotImplementedError

    with pytest.raises(ConfigError, match="AutoTokenizer"):
        SegmentTokenizer(Opaque())
