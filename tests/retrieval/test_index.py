"""The index of a folder: found again, kept between calls, mended where damaged, private."""

import json
import stat

import numpy as np
import pytest

from entroprefill_rag.errors import DocumentError, ModelSourceError, RequestError
from entroprefill_rag.retrieval import FolderIndex
from entroprefill_rag.retrieval.index import request_chunks
from entroprefill_rag.retrieval.store import clear_indexes, indexes_dir, kept_indexes


class LetterEmbedder:
    """Counts letters: a real if crude embedding, which needs no weights and counts what it is asked for."""

    name = "letters"

    def __init__(self, letters="abcdefghijklmnopqrstuvwxyz", fingerprint="letters-1"):
        self.letters = letters
        self.fingerprint = fingerprint
        self.embedded = []

    def _vector(self, text):
        counts = np.array([1e-3 + text.lower().count(letter) for letter in self.letters], dtype=np.float32)
        return counts / np.linalg.norm(counts)

    def documents(self, texts, progress=None):
        self.embedded += texts
        if progress is not None:
            progress(len(texts), len(texts))
        return np.stack([self._vector(text) for text in texts])

    def query(self, text):
        return self._vector(text)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENTROPREFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.md").write_text("# Aaa\n\naaaa aaaa")
    (folder / "b.md").write_text("# Bbb\n\nbbbb bbbb")
    (folder / "z.html").write_text("<h1>Zzz</h1><p>zzzz</p>")
    return folder


def test_the_most_similar_chunk_comes_first_and_scores_fall(docs):
    hits = FolderIndex.open(docs, LetterEmbedder()).search("bbb", top_k=3)
    assert hits[0].chunk.id == "b.md#0"
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert hits[0].score > 0.9 > hits[1].score


def test_equal_scores_keep_the_order_of_the_documents(docs):
    flat = LetterEmbedder(letters="0")
    assert [hit.chunk.id for hit in FolderIndex.open(docs, flat).search("q")] == ["a.md#0", "b.md#0", "z.html#0"]


def test_request_chunks_carry_path_and_score(docs):
    chunks = request_chunks(FolderIndex.open(docs, LetterEmbedder()).search("bbb", top_k=1))
    assert chunks[0].metadata["path"] == "b.md"
    assert chunks[0].metadata["score"] > 0.9


def test_the_second_opening_embeds_nothing_and_gives_the_same(docs):
    first = FolderIndex.open(docs, LetterEmbedder())
    embedder = LetterEmbedder()
    second = FolderIndex.open(docs, embedder)
    assert (first.embedded, second.embedded, embedder.embedded) == (3, 0, [])
    assert np.array_equal(first.vectors, second.vectors)
    assert first.chunks == second.chunks
    assert second.notes == ()


def test_a_changed_file_is_embedded_alone(docs):
    FolderIndex.open(docs, LetterEmbedder())
    (docs / "b.md").write_text("# Ccc\n\ncccc")
    embedder = LetterEmbedder()
    index = FolderIndex.open(docs, embedder)
    assert embedder.embedded == ["Ccc\n# Ccc\n\ncccc"]
    assert index.search("ccc", 1)[0].chunk.id == "b.md#0"


def test_a_removed_file_is_forgotten_with_its_text(docs, cache):
    FolderIndex.open(docs, LetterEmbedder())
    assert len(list(cache.rglob("texts/*.json"))) == 1
    (docs / "z.html").unlink()
    FolderIndex.open(docs, LetterEmbedder())
    with np.load(next(cache.rglob("vectors.npz")), allow_pickle=False) as kept:
        assert kept["vectors"].shape[0] == 2
    assert list(cache.rglob("texts/*.json")) == []


def test_another_embedder_or_other_sizes_get_their_own_index(docs):
    FolderIndex.open(docs, LetterEmbedder())
    assert FolderIndex.open(docs, LetterEmbedder(fingerprint="letters-2")).embedded == 3
    assert FolderIndex.open(docs, LetterEmbedder(), max_characters=400).embedded == 3


def test_without_a_cache_nothing_is_written(docs, cache):
    assert FolderIndex.open(docs, LetterEmbedder(), cache=False).embedded == 3
    assert not cache.exists()


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 nonsense", b"\x80\x04N."])
def test_a_damaged_index_is_made_anew_and_said_so(docs, cache, damage):
    FolderIndex.open(docs, LetterEmbedder())
    next(cache.rglob("vectors.npz")).write_bytes(damage)
    for file in cache.rglob("texts/*.json"):
        file.write_bytes(damage)
    index = FolderIndex.open(docs, LetterEmbedder())
    assert index.embedded == 3
    assert "the kept index was damaged and was made anew" in index.notes
    assert FolderIndex.open(docs, LetterEmbedder()).notes == ()


def test_arrays_of_objects_are_never_unpickled(docs, cache):
    FolderIndex.open(docs, LetterEmbedder())
    with next(cache.rglob("vectors.npz")).open("wb") as file:
        np.savez(file, hashes=np.array([{}], dtype=object), vectors=np.zeros((1, 26), np.float32))
    assert FolderIndex.open(docs, LetterEmbedder()).embedded == 3


def test_vectors_that_are_no_numbers_are_not_used(docs, cache):
    FolderIndex.open(docs, LetterEmbedder())
    file = next(cache.rglob("vectors.npz"))
    with np.load(file) as kept:
        hashes, vectors = kept["hashes"], kept["vectors"]
    vectors[0, 0] = np.nan
    with file.open("wb") as stream:
        np.savez(stream, hashes=hashes, vectors=vectors)
    assert FolderIndex.open(docs, LetterEmbedder()).embedded == 3


def test_kept_vectors_of_another_length_name_the_way_out(docs):
    FolderIndex.open(docs, LetterEmbedder())
    with pytest.raises(ModelSourceError, match="entroprefill cache clear"):
        FolderIndex.open(docs, LetterEmbedder(letters="abc")).search("a")
    (docs / "new.md").write_text("more")
    with pytest.raises(ModelSourceError, match="entroprefill cache clear"):
        FolderIndex.open(docs, LetterEmbedder(letters="abc"))


def test_an_interrupted_first_run_goes_on_where_it_stopped(docs, monkeypatch):
    monkeypatch.setattr("entroprefill_rag.retrieval.index._SLAB", 1)

    class Interrupted(LetterEmbedder):
        def documents(self, texts, progress=None):
            if len(self.embedded) == 2:
                raise KeyboardInterrupt
            return super().documents(texts, progress)

    with pytest.raises(KeyboardInterrupt):
        FolderIndex.open(docs, Interrupted())
    assert FolderIndex.open(docs, LetterEmbedder()).embedded == 1


def test_what_is_kept_is_for_its_owner_only(docs, cache):
    FolderIndex.open(docs, LetterEmbedder())
    kept = list((cache / "indexes").rglob("*"))
    assert any(file.name == "vectors.npz" for file in kept)
    for file in kept:
        assert stat.S_IMODE(file.stat().st_mode) == (0o700 if file.is_dir() else 0o600), file


def test_a_cache_that_cannot_be_written_costs_time_only(docs, cache):
    cache.write_text("a file where the folder should be")
    index = FolderIndex.open(docs, LetterEmbedder())
    assert index.embedded == 3
    assert any("could not be kept" in note for note in index.notes)


def test_the_cache_can_be_listed_and_cleared(docs):
    FolderIndex.open(docs, LetterEmbedder())
    (indexes_dir() / "odd").mkdir()
    first, odd = kept_indexes()
    assert (first.documents, first.embedder, first.chunks) == (str(docs), "letters", 3)
    assert odd.documents == "(unfinished or damaged)"
    assert clear_indexes() == first.size > 0
    assert kept_indexes() == []


def test_progress_names_the_stage_and_ends_complete(docs):
    told = []
    FolderIndex.open(docs, LetterEmbedder(), progress=lambda *step: told.append(step))
    assert told == [("reading", 0, 0), ("reading", 3, 3), ("embedding", 3, 3)]


def test_nothing_kept_holds_text_of_plain_documents(docs, cache):
    (docs / "a.md").write_text("confidential words")
    FolderIndex.open(docs, LetterEmbedder())
    for file in cache.rglob("*"):
        assert file.is_dir() or b"confidential" not in file.read_bytes()
    assert json.loads(next(cache.rglob("about.json")).read_text())["chunks"] == 3


def test_bad_questions_are_refused(docs):
    index = FolderIndex.open(docs, LetterEmbedder())
    with pytest.raises(RequestError, match="the question is empty"):
        index.search(" ")
    with pytest.raises(RequestError, match="lone surrogates"):
        index.search("a\udcff")
    with pytest.raises(RequestError, match="top_k must be at least 1, got 0"):
        index.search("a", 0)


def test_text_that_no_eye_sees_is_still_a_chunk(tmp_path):
    (tmp_path / "a.txt").write_text("\u200b")
    assert len(FolderIndex.open(tmp_path / "a.txt", LetterEmbedder()).chunks) == 1


def test_only_white_space_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("\u2003 \n")
    with pytest.raises(DocumentError, match="1 x empty"):
        FolderIndex.open(tmp_path, LetterEmbedder(), cache=False)
