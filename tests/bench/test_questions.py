"""Questions are read or refused with the line's number, and taken from their sets in turn."""

import json

import pytest

from entroprefill_rag.bench.questions import in_turn, load
from entroprefill_rag.errors import RequestError


def test_sets_take_turns(questions):
    assert [one.id for one in in_turn(questions)] == ["red-0", "blue-2", "red-1"]
    assert [one.id for one in in_turn(questions, 2)] == ["red-0", "blue-2"]


def test_the_set_is_the_file_where_none_is_named(tmp_path, data_file):
    told = json.loads(data_file.read_text().splitlines()[0])
    del told["set"]
    file = tmp_path / "green.jsonl"
    file.write_text(json.dumps(told))
    assert load([file])[0].set == "green"


def test_a_request_keeps_the_order_of_the_chunks(questions):
    assert [chunk.id for chunk in questions[0].request(["c4", "c1"]).chunks] == ["c1", "c4"]


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": "none"},
        {"gold_chunk_ids": ["elsewhere"]},
        {"meta": {"gold_need": "most"}},
        {"question": "  "},
        {"answers": None},
        {"answers": "owls"},
        {"gold_chunk_ids": "c0"},
    ],
)
def test_what_is_no_question_is_refused_with_its_line(tmp_path, data_file, change):
    lines = data_file.read_text().splitlines()
    file = tmp_path / "bad.jsonl"
    file.write_text(f"{lines[0]}\n{json.dumps({**json.loads(lines[1]), **change})}\n")
    with pytest.raises(RequestError, match="line 2 of"):
        load([file])


def test_the_same_question_twice_is_refused(tmp_path, data_file):
    file = tmp_path / "twice.jsonl"
    file.write_text(data_file.read_text() * 2)
    with pytest.raises(RequestError, match="repeats the id 'red-0'"):
        load([file])


def test_line_separators_inside_a_text_end_no_line(tmp_path, data_file):
    told = json.loads(data_file.read_text().splitlines()[0])
    told["chunks"][0]["text"] = "one\u2028two\x85three"
    file = tmp_path / "odd.jsonl"
    file.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
    assert load([file])[0].chunks[0].text == "one\u2028two\x85three"


def test_what_is_not_utf8_is_refused_with_its_line(tmp_path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"id": "caf\xe9"}\n')
    with pytest.raises(RequestError, match=r"line 1 of .*UnicodeDecodeError"):
        load([file])


def test_an_empty_file_is_refused(tmp_path):
    file = tmp_path / "empty.jsonl"
    file.write_text("\n")
    with pytest.raises(RequestError, match="no question with chunks"):
        load([file])
