"""Splitting: nothing is lost, nothing is torn, ids and titles are stable."""

import time
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entroprefill_rag.documents import Document, split
from entroprefill_rag.documents.headings import markdown_headings
from entroprefill_rag.errors import ConfigError

PARAGRAPH = "The valve opens at nine bar. It closes at six bar, slowly. "


def document(text, kind="text"):
    return Document("d.md", text, kind, markdown_headings(text) if kind == "markdown" else ())


@given(st.text(max_size=3000), st.sampled_from(["text", "markdown"]), st.integers(50, 400))
def test_chunks_hold_every_visible_character_once_and_are_no_longer_than_asked(text, kind, longest):
    chunks = split(document(text, kind), max_characters=longest)
    assert "".join("".join(chunk.text for chunk in chunks).split()) == "".join(text.split())
    for number, chunk in enumerate(chunks):
        assert chunk.id == f"d.md#{number}"
        assert len(chunk.text) <= longest
        assert chunk.text == text[chunk.metadata["start"] : chunk.metadata["end"]]


def test_paragraphs_stay_whole_where_they_fit():
    paragraphs = [f"{number}. {PARAGRAPH * 4}".strip() for number in range(20)]
    chunks = split(document("\n\n".join(paragraphs)), max_characters=800)
    assert [part for chunk in chunks for part in chunk.text.split("\n\n")] == paragraphs
    assert 400 < sum(len(chunk.text) for chunk in chunks) / len(chunks) <= 800


def test_a_chunk_starts_at_its_heading_and_is_named_by_it():
    text = "# Pump\n\n" + PARAGRAPH * 10 + "\n\n## Valve\n\n" + PARAGRAPH * 10
    chunks = split(document(text, "markdown"))
    assert [chunk.title for chunk in chunks] == ["Pump", "Pump > Valve"]
    assert chunks[1].text.startswith("## Valve")


def test_a_text_without_headings_is_named_by_its_path():
    assert split(document(PARAGRAPH))[0].title == "d.md"


def test_long_lines_are_split_between_sentences_or_words():
    for chunk in split(document(PARAGRAPH * 400)):
        assert chunk.text[0] in "TI"
        assert chunk.text.endswith(".")


def test_graphemes_are_not_torn():
    family = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
    for chunk in split(document(family * 4000 + "e\u0301" * 12_000)):
        assert chunk.text[0] != "\u200d"
        assert not unicodedata.combining(chunk.text[0])


def test_scripts_of_many_bytes_get_shorter_chunks():
    latin = split(document("word and word. " * 300))
    thai = split(document("ภาษาไทยไม่มีช่องว่าง" * 200))
    assert max(len(chunk.text) for chunk in thai) < max(len(chunk.text) for chunk in latin) / 2


def test_overlap_repeats_the_end_of_the_chunk_before():
    chunks = split(document("\n".join(f"line {number:04d}" for number in range(400))), max_characters=200, overlap=60)
    for before, after in pairwise(chunks):
        assert 0 < before.metadata["end"] - after.metadata["start"] <= 60


def test_a_megabyte_without_a_boundary_takes_seconds_not_minutes():
    started = time.process_time()
    chunks = split(document("x" * 1_000_000))
    assert len(chunks) >= 1250
    assert time.process_time() - started < 10


@pytest.mark.parametrize(("longest", "overlap"), [(10, 0), (800, 500), (800, -1)])
def test_impossible_sizes_are_refused(longest, overlap):
    with pytest.raises(ConfigError, match="max_characters must be at least 50"):
        split(document("x"), longest, overlap)
