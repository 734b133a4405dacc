"""A conversation: what the model reads again, what is remembered of an answer, what is left out first."""

import threading

import pytest

from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import RequestError
from entroprefill_rag.record import GenerationResult
from entroprefill_rag.request import Turn


def answer(session, question):
    [*_, result] = session.ask(question)
    assert isinstance(result, GenerationResult)
    return result


def test_the_model_reads_earlier_questions_and_answers_again(session):
    first = answer(session, "Where are bees?")
    assert session.last.request.history == ()
    answer(session, "And jazz?")
    expected = (Turn(role="user", content="Where are bees?"), Turn(role="assistant", content=first.answer))
    assert session.last.request.history == expected
    rendered = session.backend.layout(session.last.request).rendered
    assert rendered.index("Where are bees?") < rendered.index("Bees need trees") < rendered.index("And jazz?")


def test_no_more_is_remembered_than_was_asked_for(session):
    session.remembered = 1
    for question in ("a bee?", "a drum?", "a loop?"):
        answer(session, question)
    assert [turn.content for turn in session.last.request.history if turn.role == "user"] == ["a drum?"]
    session.remembered = 0
    answer(session, "oil?")
    assert session.last.request.history == ()


def test_a_new_conversation_knows_nothing_of_the_old_one(session):
    answer(session, "a bee?")
    session.forget()
    with pytest.raises(RequestError, match="no answer to look at"):
        session.asked()
    answer(session, "a drum?")
    assert session.last.request.history == ()


def test_an_answer_that_is_left_early_ends_and_is_no_part_of_the_history(session):
    session.max_new_tokens = 500
    stream = session.ask("a bee?")
    next(stream)
    next(stream)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "entroprefill-stream"]
    assert session.history == []
    assert session.last.answer is None
    assert session.last.usage is None
    assert session.last.record.outcome == "pruned"


def test_a_question_that_cannot_be_asked_leaves_no_answer_of_another_one(session):
    answer(session, "a bee?")
    with pytest.raises(RequestError):
        answer(session, " ")
    assert session.last is None
    assert len(session.history) == 2


@pytest.mark.parametrize("overflow", ["error", "drop_last"])
def test_the_oldest_turns_are_left_out_before_a_chunk_is(session, overflow):
    session.config = session.config.model_copy(update={"overflow": overflow})
    # A byte is a token: together these exceed the model's 2,048 positions, the later one alone does not.
    for length in (1900, 900):
        session.history += [Turn(role="user", content="q"), Turn(role="assistant", content="x" * length)]
    answer(session, "a bee?")
    assert [len(turn.content) for turn in session.last.request.history] == [1, 900]
    assert session.last.left_out == 1
    assert session.last.record.prompt.not_admitted == ()


def test_the_same_question_in_full_reads_the_same_prompt_and_changes_nothing(session):
    answer(session, "a bee?")
    answer(session, "a drum?")
    before, turns = session.last, list(session.history)
    [*_, full] = session.in_full()
    assert full.audit.outcome == "off"
    assert full.dropped_ids == ()
    assert full.audit.prompt.hash == before.record.prompt.hash
    assert session.last is before
    assert session.history == turns


def test_without_pruning_it_is_a_chat_all_the_same(session):
    session.config = PruningConfig(enabled=False)
    assert answer(session, "a bee?").audit.outcome == "off"
