"""Training questions: their gold chunks are right, they vary in form, and they follow from texts and seed."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entroprefill_rag import Chunk
from entroprefill_rag.calibration.questions import FORMS, make_questions, packaged_chunks
from entroprefill_rag.errors import ProfileError

PASSAGES = packaged_chunks()


def sentences(text):
    return [part.strip(" .") for part in text.split(". ")]


def origin(chunk):
    """The packaged passage that a chunk came from."""
    return next(one for one in PASSAGES if one.title == chunk.title)


def test_the_packaged_passages_are_about_different_things():
    assert len(PASSAGES) >= 40
    assert len({one.title for one in PASSAGES}) == len(PASSAGES)
    assert all(40 <= len(one.text.split()) <= 100 for one in PASSAGES)
    facts = Counter(sentence for one in PASSAGES for sentence in sentences(one.text))
    assert set(facts.values()) == {1}


def test_the_same_seed_gives_the_same_questions_and_another_one_others():
    one, again = (make_questions([PASSAGES], 20, seed=3) for _ in range(2))
    assert one == again
    assert one != make_questions([PASSAGES], 20, seed=4)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(4, 14))
def test_every_question_names_chunks_that_are_there(seed, chunks):
    for question in make_questions([PASSAGES], 15, seed=seed, chunks=chunks):
        shown = question.request.chunks
        assert len(shown) == chunks
        assert len({chunk.title for chunk in shown}) == chunks
        assert len(question.gold) == (2 if question.form == "two_chunks" else 1)
        assert all(0 <= place < chunks for place in question.gold)


def test_all_forms_come_in_about_equal_numbers():
    found = Counter(one.form for one in make_questions([PASSAGES], 50))
    assert set(found) == set(FORMS)
    assert max(found.values()) - min(found.values()) <= 3


def test_the_words_of_a_question_come_from_its_gold_chunk():
    for question in make_questions([PASSAGES], 60):
        gold = " ".join(origin(question.request.chunks[place]).text for place in question.gold).lower()
        words = [word.strip("?,.:").lower() for word in question.request.query.split()]
        share = sum(word in gold for word in words) / len(words)
        assert share > 0.4, question.request.query


def test_where_the_sentence_is_removed_no_chunk_holds_it():
    asked = [one for one in make_questions([PASSAGES], 60) if one.form == "removed"]
    assert asked
    for question in asked:
        [place] = question.gold
        shown = question.request.chunks[place]
        missing = [one for one in sentences(origin(shown).text) if one not in shown.text]
        assert len(missing) == 1
        others = [chunk for i, chunk in enumerate(question.request.chunks) if i != place]
        assert all(missing[0] not in chunk.text for chunk in others)
        assert shown.text


def test_a_question_is_never_the_whole_sentence():
    for question in make_questions([PASSAGES], 60):
        texts = " ".join(chunk.text for chunk in question.request.chunks)
        assert all(sentence not in question.request.query for sentence in sentences(texts))


def test_gold_chunks_stand_at_all_places():
    places = Counter(place for one in make_questions([PASSAGES], 100) for place in one.gold)
    assert len(places) == 10


def test_chunk_ids_say_nothing():
    question = make_questions([PASSAGES], 1)[0]
    assert [chunk.id for chunk in question.request.chunks] == [f"c{i}" for i in range(10)]


def test_questions_of_one_text_share_a_group():
    made = make_questions([PASSAGES], 100)
    titles = {}
    for one in made:
        if one.form != "two_chunks":
            titles.setdefault(one.group, set()).add(one.request.chunks[one.gold[0]].title)
    assert all(len(found) == 1 for found in titles.values())


def test_chunks_of_other_requests_are_no_distractors():
    pools = [PASSAGES[:6], PASSAGES[6:12]]
    for one in make_questions(pools, 30):
        titles = {chunk.title for chunk in one.request.chunks}
        assert titles <= {chunk.title for chunk in pools[0]} or titles <= {chunk.title for chunk in pools[1]}


def test_few_texts_give_what_they_give():
    text = "The first fact here is about seven old boats. The second fact there is about nine new barns."
    pool = [Chunk(id=str(i), text=f"{text} It has the number {i}.") for i in range(4)]
    assert 0 < len(make_questions([pool], 10_000)) < 200


@pytest.mark.parametrize("pools", [[], [[]], [PASSAGES[:3]], [[Chunk(id=str(i), text="Too short.") for i in range(9)]]])
def test_texts_of_no_use_are_refused(pools):
    with pytest.raises(ProfileError, match="no training question"):
        make_questions(pools, 10)
