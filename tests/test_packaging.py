"""What is installed is what is in the repository, `integrations/` included, however it is installed."""

import importlib
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"entroprefill_rag": ROOT / "entroprefill_rag", "entroprefill_rag.integrations": ROOT / "integrations"}


def package_folders() -> dict[str, Path]:
    """Every folder with Python files in it, by the name it is imported under."""
    found = {}
    for name, root in SOURCES.items():
        for file in root.rglob("*.py"):
            folder = file.parent
            found[".".join([name, *folder.relative_to(root).parts])] = folder
    return found


def test_every_package_folder_is_listed_in_pyproject():
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(package_folders())


def test_every_package_folder_can_be_imported_from_the_editable_install():
    for name, folder in package_folders().items():
        module = importlib.import_module(name)
        assert Path(str(module.__file__)).parent == folder


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_the_licence(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    # Built from a copy: building in place would write build/ into the checkout.
    for name in ("entroprefill_rag", "integrations"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True, text=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        f"{name.replace('.', '/')}/{file.relative_to(root).as_posix()}"
        for name, root in SOURCES.items()
        for file in root.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "entroprefill_rag/py.typed" in expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
