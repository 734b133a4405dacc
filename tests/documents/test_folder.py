"""Reading a folder: what is read, what is left out and why, and that nothing crashes or escapes."""

import os
import sys

import pytest

from entroprefill_rag.documents import Limits, read_folder, split
from entroprefill_rag.errors import DocumentError


def paths(reading):
    return [document.path for document in reading.documents]


def reasons(reading):
    return {skipped.path: skipped.reason for skipped in reading.skipped}


def test_documents_come_sorted_with_relative_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("# Two\n\ntext")
    (tmp_path / "one.txt").write_text("text")
    reading = read_folder(tmp_path)
    assert paths(reading) == ["b/two.md", "one.txt"]
    assert [document.kind for document in reading.documents] == ["markdown", "text"]
    assert reading.skipped == []


def test_one_file_can_be_read_alone(tmp_path):
    file = tmp_path / ".hidden.md"
    file.write_text("text")
    assert paths(read_folder(file)) == [".hidden.md"]


def test_hidden_and_unknown_files_are_skipped_with_the_reason(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / ".env").write_text("SECRET=1")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "notes.txt").write_text("text")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "x.md").write_text("text")
    reading = read_folder(tmp_path)
    assert paths(reading) == ["a.txt"]
    assert reasons(reading) == {
        ".env": "hidden",
        ".git": "hidden",
        "node_modules": "a folder of machine-made files",
        "photo.png": "not a kind that is read (.png)",
    }


def test_links_are_never_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    (folder / "file.txt").symlink_to(outside / "secret.txt")
    (folder / "folder").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    (folder / "nowhere.txt").symlink_to(folder / "missing")
    reading = read_folder(folder)
    assert paths(reading) == ["a.txt"]
    assert reasons(reading) == {
        "file.txt": "a symbolic link out of the folder",
        "folder": "a symbolic link out of the folder",
        "loop": "a symbolic link in the folder",
        "nowhere.txt": "a symbolic link in the folder",
    }


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert paths(read_folder(tmp_path / "link")) == ["a.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("text")
    assert reasons(read_folder(tmp_path)) == {"pipe.txt": "not a regular file"}


def test_sizes_are_limited(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 60)
    (tmp_path / "b.txt").write_text("x" * 60)
    (tmp_path / "c.txt").write_text("x" * 500)
    reading = read_folder(tmp_path, Limits(max_file_bytes=100, max_total_bytes=100))
    assert paths(reading) == ["a.txt"]
    assert reasons(reading)["b.txt"] == "over the limit for all files together"
    assert "more than the limit of 100" in reasons(reading)["c.txt"]


def test_the_number_of_files_is_limited(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x")
    reading = read_folder(tmp_path, Limits(max_files=3))
    assert paths(reading) == ["0.txt", "1.txt", "2.txt"]
    assert "more than 3 files" in reasons(reading)["3.txt"]


def test_a_long_text_is_cut_and_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 60)
    document = read_folder(tmp_path, Limits(max_characters=50)).documents[0]
    assert len(document.text) == 50
    assert document.notes == ("cut after 50 characters",)


@pytest.mark.skipif(sys.platform != "linux", reason="file names that are not UTF-8")
def test_a_name_that_is_not_utf8_can_still_be_written_and_stays_unique(tmp_path):
    for raw in (b"caf\xe9.txt", b"caf\xe8.txt"):
        (tmp_path / os.fsdecode(raw)).write_text("text")
    names = paths(read_folder(tmp_path))
    assert names == ["caf\\xe8.txt", "caf\\xe9.txt"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the owner may read everything")
def test_what_may_not_be_opened_is_skipped(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "locked.txt").write_text("text")
    (tmp_path / "locked.txt").chmod(0)
    assert reasons(read_folder(tmp_path)) == {"locked.txt": "cannot be opened (Permission denied)"}


def test_nothing_readable_is_an_error_that_says_what_was_seen(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "b.txt").write_text("  \n")
    with pytest.raises(DocumentError, match=r"1 x not a kind that is read \(\.png\).*1 x empty.*readable are \.md"):
        read_folder(tmp_path)


def test_an_empty_folder_and_a_missing_one_are_errors(tmp_path):
    with pytest.raises(DocumentError, match="it is empty"):
        read_folder(tmp_path)
    with pytest.raises(DocumentError, match="does not exist"):
        read_folder(tmp_path / "missing")


def test_messy_documents_are_read_and_split_whole(data_dir):
    reading = read_folder(data_dir / "messy")
    assert len(reading.documents) >= 24
    assert "29_invalid_utf8.bin" in reasons(reading)
    for document in reading.documents:
        document.text.encode()
        chunks = split(document)
        there = "".join("".join(chunk.text for chunk in chunks).split())
        assert there == "".join(document.text.split()), document.path
        assert len({chunk.id for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert document.text[chunk.metadata["start"] : chunk.metadata["end"]] == chunk.text
