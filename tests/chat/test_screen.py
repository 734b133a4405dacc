"""What a person sees under an answer: retained sources by the numbers the model read, and numbers that are wrong."""

import re

import pytest

from entroprefill_rag.chat.screen import Screen


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return Screen()


def shown(screen, session, capsys, text):
    for _ in session.ask("a bee?"):
        pass
    session.last.answer = text
    capsys.readouterr()
    screen.citations(session.last)
    return capsys.readouterr().out


def test_retained_sources_only_under_the_numbers_that_the_prompt_gives_them(screen, session, capsys):
    out = shown(screen, session, capsys, "")
    record, request = session.last.record, session.last.request
    assert record.dropped_ids
    rendered = session.backend.layout(request).rendered
    paths = dict(re.findall(r"^\s*\[(\d+)\]\s+(\S+)", out, re.MULTILINE))
    assert len(paths) == len(record.retained_ids)
    for number, chunk in enumerate(request.chunks, start=1):
        assert (f"Document [{number}]: {chunk.title}\n" in rendered) == bool(chunk.title)
        assert (str(number) in paths) == (chunk.id in record.retained_ids)
        if str(number) in paths:
            assert paths[str(number)] in chunk.metadata["path"]


def test_numbers_in_an_answer_are_held_against_the_sources(screen, session, capsys):
    shown(screen, session, capsys, "")
    record = session.last.record
    status = {number: chunk.kept for number, chunk in enumerate(record.prompt.chunks, start=1)}
    kept = next(number for number, stays in status.items() if stays)
    gone = next(number for number, stays in status.items() if not stays)
    session.last.answer = f"So it is [{kept}][{gone}], see also [77]."
    screen.citations(session.last)
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if line.strip().startswith(f"[{kept}]")]
    assert "named in the answer" in line
    assert out.count("named in the answer") == 1
    assert f"names [{gone}], which was dropped" in out
    assert "names [77], which is the number of no source" in out


def test_names_of_documents_cannot_steer_the_terminal(screen, session, capsys):
    out = shown(screen, session, capsys, "")
    screen.side_by_side(session.last, list(session.in_full())[-1])
    out += capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\x07"} & set(out)
