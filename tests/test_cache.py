"""Folders in the cache appear whole or not at all, are private, and are built once."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from entroprefill_rag.cache import build_folder, cache_dir, private_dir


def fill(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")


def test_the_root_is_what_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("ENTROPREFILL_CACHE", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    monkeypatch.setenv("ENTROPREFILL_CACHE", "~/there")
    assert cache_dir() == Path.home() / "there"
    monkeypatch.delenv("ENTROPREFILL_CACHE")
    assert cache_dir().name == "entroprefill"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_what_is_made_is_for_its_owner_only_and_what_was_there_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    old = os.umask(0)
    try:
        built = build_folder(tmp_path / "models" / "x", fill)
    finally:
        os.umask(old)
    modes = {path: path.stat().st_mode & 0o777 for path in (built, built.parent, tmp_path)}
    assert modes == {built: 0o700, built.parent: 0o700, tmp_path: 0o755}


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_folder_left_open_is_closed(tmp_path):
    (tmp_path / "models").mkdir(mode=0o755)
    assert private_dir(tmp_path / "models").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_there_is_not_built_again(tmp_path):
    target = build_folder(tmp_path / "x", fill)
    assert build_folder(target, lambda folder: pytest.fail("built twice")) == target
    assert sorted(path.name for path in target.iterdir()) == ["a", "b"]


def test_a_failing_build_leaves_nothing_and_can_be_tried_again(tmp_path):
    def fail(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_folder(tmp_path / "x", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert build_folder(tmp_path / "x", fill).is_dir()


def test_what_a_killed_process_left_is_swept_away(tmp_path):
    (tmp_path / ".x.partial-dead").mkdir()
    (tmp_path / ".y.partial-alive").mkdir()
    build_folder(tmp_path / "x", fill)
    assert not (tmp_path / ".x.partial-dead").exists()
    assert (tmp_path / ".y.partial-alive").exists()


def test_where_locks_do_not_hold_the_first_to_finish_wins(tmp_path):
    def slower(folder: Path) -> None:
        fill(folder)
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "theirs").write_text("")

    assert build_folder(tmp_path / "x", slower) == tmp_path / "x"
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["theirs"]


def test_readers_never_see_a_half_built_folder(tmp_path):
    def slowly(folder: Path) -> None:
        (folder / "a").write_text("a")
        time.sleep(0.2)
        (folder / "b").write_text("b")

    builder = threading.Thread(target=build_folder, args=(tmp_path / "x", slowly))
    builder.start()
    while not (tmp_path / "x").exists():
        assert builder.is_alive() or (tmp_path / "x").exists()
    seen = sorted(path.name for path in (tmp_path / "x").iterdir())
    builder.join()
    assert seen == ["a", "b"]


BUILDER = """
import sys, time
from pathlib import Path
from entroprefill_rag.cache import build_folder
root = Path(sys.argv[1])
def build(folder):
    with (root / "builds").open("a") as log:
        log.write("built\\n")
    time.sleep(0.5)
    (folder / "done").write_text("whole")
print((build_folder(root / "cache" / "x", build) / "done").read_text())
"""


def test_of_several_processes_one_builds_and_all_get_the_folder(tmp_path):
    commands = [[sys.executable, "-c", BUILDER, str(tmp_path)]] * 3
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    assert [process.communicate(timeout=60)[0].strip() for process in running] == ["whole"] * 3
    assert (tmp_path / "builds").read_text() == "built\n"
