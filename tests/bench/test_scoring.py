"""Answers are scored by what they say, need by what was kept."""

import pytest

from entroprefill_rag.bench.scoring import declines, found, need_met, normalised, token_f1


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("It is the Eiffel Tower.", ["Eiffel tower"], True),
        ("In 2019, I think.", ["201"], False),
        ("About 1,200.5 dollars", ["1200.5"], True),
        ("U.S. forces", ["the US"], True),
        ("mid-1990s", ["1990s"], True),
        ("答案是北京市。", ["北京"], True),
        ("Paris", ["London", "paris"], True),
        ("Paris", ["London"], False),
        ("The", ["the"], True),
    ],
)
def test_an_accepted_string_must_occur_as_whole_words(answer, accepted, expected):
    assert found(answer, accepted) is expected


def test_without_an_accepted_string_there_is_nothing_to_find():
    assert found("anything", []) is None
    assert token_f1("anything", []) is None


def test_token_f1_is_that_of_the_best_accepted_string():
    assert token_f1("the red fox", ["red fox"]) == 1.0
    assert token_f1("a red fox runs", ["fox", "cat"]) == pytest.approx(2 * 1 / (3 + 1))
    assert token_f1("nothing", ["fox"]) == 0.0


def test_normalising_keeps_decimal_points_and_drops_articles():
    assert normalised("  The value, $1,234.5, a sum. ") == "value 1234.5 sum"


@pytest.mark.parametrize("text", ["The documents do not mention it.", "I don't know.", "Cannot be determined", " "])
def test_an_answer_that_says_it_cannot_be_given_declines(text):
    assert declines(text)


@pytest.mark.parametrize("text", ["It was built in 1889.", "The Unknown Soldier lies there."])
def test_an_answer_declines_only_by_set_phrases(text):
    assert not declines(text)


@pytest.mark.parametrize(
    ("kept", "need", "expected"),
    [
        (["a", "b", "c"], "all", True),
        (["a", "c"], "all", False),
        (["a", "c"], "any", True),
        (["b"], "part", True),
        (["c"], "any", False),
        (["a"], "none", None),
    ],
)
def test_need_is_met_by_all_gold_or_any_one(kept, need, expected):
    assert need_met(kept, frozenset("ab"), need) is expected


def test_a_question_without_gold_needs_nothing():
    assert need_met(["a"], frozenset(), "all") is None
