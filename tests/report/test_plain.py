"""Text of strangers cannot steer a terminal, whole or in pieces."""

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entroprefill_rag.report.plain import PlainStream, one_line, plain

HOSTILE = st.text(
    alphabet=st.sampled_from("\x1b\x9b\x9d\x90\x07\x9c[]P;?0138mKJh\\\r\n\t aé\u202e\x00\x7f"), max_size=60
)


def harmless(text):
    return all(unicodedata.category(mark) not in ("Cc", "Cs") or mark in "\n\t" for mark in text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("\x9b31mred", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;ZXZpbA==\x9ctext", "text"),
        ("\x1bPq#0\x1b\\text", "text"),
        ("\x1bctext", "text"),
        ("a\x08\x08b\x00c\x7f", "abc"),
        ("line\r\nnext\rlast\tend", "line\nnext\nlast\tend"),
        ("admin\u202etxt.exe", "admintxt.exe"),
        ("שלום 世界 👩\u200d👧", "שלום 世界 👩\u200d👧"),
        ("\x1b]unfinished stays readable", "]unfinished stays readable"),
    ],
)
def test_escape_sequences_and_control_characters_go_and_text_stays(text, shown):
    assert plain(text) == shown


@given(HOSTILE)
def test_nothing_that_a_terminal_obeys_gets_through(text):
    assert harmless(plain(text))
    assert harmless(one_line(text))
    assert "\n" not in one_line(text)


@given(st.lists(HOSTILE, max_size=8))
def test_pieces_give_what_the_whole_gives_however_they_are_cut(pieces):
    stream = PlainStream()
    shown = "".join(stream.feed(piece) for piece in pieces) + stream.close()
    assert harmless(shown)
    assert shown == plain("".join(pieces))


@given(st.text(max_size=200))
def test_text_without_control_characters_is_streamed_at_once(text):
    if harmless(text) and plain(text) == text:
        assert PlainStream().feed(text) == text


def test_a_stream_never_holds_back_without_end():
    stream = PlainStream()
    assert stream.feed("\x1b]" + "x" * 1000).count("x") == 1000


def test_lines_are_shortened():
    assert one_line("word " * 100, 20) == "word word word word…"


def test_hostile_text_takes_time_linear_in_its_size():
    started = time.process_time()
    for hostile in ("\x90" * 100_000, "\x1b[" * 100_000, "\x1b]" * 100_000, "\x1b[" + "0" * 200_000):
        plain(hostile)
        one_line(hostile)
    assert time.process_time() - started < 5
