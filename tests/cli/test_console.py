"""Closed streams, broken pipes and other people's errors: one line and the right exit code."""

import errno
import json
import subprocess
import sys

import pytest

from entroprefill_rag.cli.console import explained
from entroprefill_rag.cli.inputs import check_outputs
from entroprefill_rag.errors import RequestError

COMMAND = [sys.executable, "-c", "from entroprefill_rag.cli import main; main()"]


def utf8_error():
    try:
        b"caf\xe9".decode()
    except UnicodeDecodeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (utf8_error(), "UTF-8"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
    ],
)
def test_what_a_bad_file_raises_is_bad_input(error, says):
    text, code = explained(error)
    assert (says in text, code) == (True, 2)


def test_a_file_that_cannot_be_written_is_refused_before_anything_slow(tmp_path):
    check_outputs({"--record": tmp_path / "new.json", "--html": None})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("kept")
    check_outputs({"--record": tmp_path / "old.json"})
    assert (tmp_path / "old.json").read_text() == "kept"
    for path in (tmp_path, tmp_path / "none" / "a.json"):
        with pytest.raises(RequestError, match="a folder that exists"):
            check_outputs({"--record": path})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_folder_that_takes_no_files_is_found_out():
    from pathlib import Path

    with pytest.raises(RequestError, match="cannot be written"):
        check_outputs({"--record": Path("/proc/record.json")})


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_reader_that_leaves_ends_a_command_quietly(tmp_path):
    # More than a pipe holds, so that the writer is sure to find it closed.
    script = "import sys; from entroprefill_rag.cli.console import *\n@guarded\ndef f(verbose=False):\n"
    script += " for _ in range(5000): console().print('x' * 80)\nimport typer\n"
    script += "try: f()\nexcept typer.Exit as e: sys.exit(e.exit_code)\n"
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "$1" | head -1; exit ${{PIPESTATUS[0]}}', "bash", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_streams_are_no_fault(tmp_path, closed):
    record = tmp_path / "r.json"
    record.write_text(json.dumps({}))
    line = " ".join(
        [sys.executable, "-c", "'from entroprefill_rag.cli import main; main()'", "show", str(record), closed]
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "AttributeError" not in done.stderr
