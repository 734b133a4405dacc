"""Where this package keeps files of its own, and how a folder appears there: whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path


def cache_dir() -> Path:
    """The cache's root: `ENTROPREFILL_CACHE` if set, else the platform's cache folder of the user."""
    override = os.environ.get("ENTROPREFILL_CACHE")
    return Path(override).expanduser().absolute() if override else user_cache_path("entroprefill", appauthor=False)


def private_dir(path: Path) -> Path:
    """Make the folder, readable by its owner only (mode 0700); parents are made too, existing ones left alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    # The umask, or an older run, may have left it open.
    path.chmod(0o700)
    return path


def build_folder(target: Path, build: Callable[[Path], None]) -> Path:
    """Fill the folder `target` by calling ``build`` on an empty one, unless it is there already.

    Readers see all of the folder or nothing: it is built beside the target and moved there in one step. Of several
    processes one builds, the others wait for it; where locks do not hold (some network disks) the first to finish
    wins and the others use its folder.

    Args:
        target: folder to make; its parent becomes private to the user.
        build: writes everything into the folder it is given; may raise, and then nothing is left behind.

    Returns:
        ``target``.
    """
    if target.is_dir():
        return target
    parent = private_dir(target.parent)
    prefix = f".{target.name}.partial-"
    with FileLock(parent / f".{target.name}.lock"):
        if target.is_dir():
            return target
        for leftover in parent.glob(f"{prefix}*"):  # of a process that was killed: nobody else builds this target now
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            build(partial)
            partial.replace(target)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and target.is_dir():
                return target
            raise
    return target
