"""Rows survive a run that is cut off, and are found by their stamp."""

import pytest

from entroprefill_rag.bench.rows import ROWS, Row, Store
from entroprefill_rag.errors import RecordError, RequestError


def row(question="q1", method="full", stamp=None, **more):
    return Row(stamp=stamp or {"v": 1}, settings="s", question=question, set="red", method=method, place=0, **more)


def test_rows_come_back_with_their_stamp(tmp_path):
    store = Store(tmp_path / "run")
    store.append([row(), row(method="ours", stamp={"v": 2}), row("q2", stamp={"v": 2})])
    assert [one.method for one in store.rows({"v": 1})] == ["full"]
    assert {one.method for one in store.rows()} == {"ours", "full"}
    assert store.rows({"v": 3}) == []


def test_a_line_that_was_cut_off_is_left_out_and_overwritten(tmp_path):
    store = Store(tmp_path)
    store.append([row("q1")])
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"stamp":{"v":1},"sett')
    assert [one.question for one in store.rows()] == ["q1"]
    store.append([row("q2")])
    assert [one.question for one in store.rows()] == ["q1", "q2"]


def test_a_row_whose_newline_is_missing_is_measured_again_and_not_lost(tmp_path):
    store = Store(tmp_path)
    store.append([row("q1"), row("q2")])
    file = tmp_path / ROWS
    file.write_bytes(file.read_bytes()[:-1])
    assert [one.question for one in store.rows()] == ["q1"]
    store.append([row("q2"), row("q3")])
    assert [one.question for one in store.rows()] == ["q1", "q2", "q3"]


def test_a_row_cut_inside_a_character_is_cut_off(tmp_path):
    store = Store(tmp_path)
    store.append([row("q1")])
    with (tmp_path / ROWS).open("ab") as file:
        file.write(b'{"stamp":{"v":1},"question":"caf\xc3')
    assert [one.question for one in store.rows()] == ["q1"]


@pytest.mark.parametrize("text", ["hello, my notes", '{"question": "mine"}'])
def test_a_file_that_is_no_runs_is_not_written_over(tmp_path, text):
    (tmp_path / ROWS).write_text(text)
    with pytest.raises(RecordError, match="not the beginning of a row"):
        Store(tmp_path).rows()


def test_line_separators_inside_a_row_end_no_line(tmp_path):
    store = Store(tmp_path)
    store.append([row("a\u2028b\x85c"), row("q2")])
    assert [one.question for one in store.rows()] == ["a\u2028b\x85c", "q2"]


def test_a_row_written_twice_counts_once_with_its_last_values(tmp_path):
    store = Store(tmp_path)
    store.append([row(f1=0.1), row(f1=0.9)])
    assert [one.f1 for one in store.rows()] == [0.9]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    store = Store(tmp_path)
    (tmp_path / ROWS).write_text(f"nonsense\n{row().model_dump_json()}\n")
    with pytest.raises(RecordError, match="line 1 of"):
        store.rows()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RecordError, match="entroprefill bench --out"):
        Store(tmp_path).run()
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(RecordError, match="not what"):
        Store(tmp_path).run()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be made a folder"):
        Store(tmp_path / "file")
