"""The ledger's file: private, shared by processes, holding no text; and what is said of a file that is none."""

import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from entroprefill_rag import ReuseLedger
from entroprefill_rag.errors import LedgerError
from entroprefill_rag.ledger import Grant, Refused, database


@pytest.fixture
def file(tmp_path):
    return tmp_path / "ledger.db"


def python(code, *arguments, check=True):
    """Run code in a process of its own; what it prints."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from entroprefill_rag import ReuseLedger\nimport os, sys\n" + code,
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_one_process_noted_the_next_one_knows(file):
    with ReuseLedger.open(file) as ledger:
        ledger.reserve("p", "c", 7, fresh=False).spend()
    code = """
ledger = ReuseLedger.open(sys.argv[1])
print(ledger.reserve("p", "d", 7, fresh=False).why, ledger.reserve("p", "c", 7, fresh=False).replay)
ledger.reserve("p", "d", 8, fresh=False).spend()
"""
    assert python(code, file) == ["changed", "True"]
    with ReuseLedger.open(file) as ledger:
        assert ledger.reserve("p", "e", 8, fresh=False) == Refused("changed", 2)


def test_processes_at_the_same_time_get_different_attempts(file):
    code = """
ledger = ReuseLedger.open(sys.argv[1])
for seed in range(25):
    grant = ledger.reserve("p", "c", 1000 * int(sys.argv[2]) + seed, fresh=True)
    grant.spend()
    print(grant.attempt)
"""
    command = "from entroprefill_rag import ReuseLedger\nimport sys\n" + code
    # None of them finds the file made.
    runs = [
        subprocess.Popen([sys.executable, "-c", command, file, str(one)], stdout=subprocess.PIPE, text=True)
        for one in range(4)
    ]
    told = [run.communicate(timeout=120)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    assert sorted(int(number) for numbers in told for number in numbers) == list(range(1, 101))


def test_a_process_that_is_killed_leaves_what_it_spent_and_nothing_half_written(file):
    code = """
ledger = ReuseLedger.open(sys.argv[1])
ledger.reserve("p", "c", 7, fresh=False).spend()
held = ledger.reserve("q", "c", 7, fresh=False)
with ledger._transaction() as sql:
    sql.execute("DELETE FROM prompts")
    os.kill(os.getpid(), 9)
"""
    python(code, file, check=False)
    with ReuseLedger.open(file) as ledger:
        assert ledger.reserve("p", "d", 7, fresh=False) == Refused("changed", 1)
        # It may yet be running elsewhere, for all that can be known; after a day it is not.
        assert ledger.reserve("q", "d", 7, fresh=False) == Refused("under_way", 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_opens_the_file_anew_and_gives_nothing_of_its_parent_back(file):
    code = """
import gc
ledger = ReuseLedger.open(sys.argv[1])
held = ledger.reserve("p", "c", 7, fresh=False)
if (child := os.fork()) == 0:
    parents = id(ledger._connection)
    del held
    gc.collect()
    ledger.reserve("p", "c", 8, fresh=False).spend()
    os._exit(0 if id(ledger._connection) != parents else 1)
assert os.waitpid(child, 0)[1] == 0
held.spend()
print(held.attempt, ledger.reserve("p", "d", 8, fresh=False).attempt)
"""
    assert python(code, file) == ["1", "2"]


def test_the_file_is_for_its_owner_only_whatever_the_umask(file):
    before = os.umask(0)
    try:
        with ReuseLedger.open(file) as ledger:
            ledger.reserve("p", "c", 7, fresh=False).spend()
            modes = {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(modes, 0o600)
    assert len(modes) == 3


def test_the_file_holds_neither_text_nor_plain_hashes(file):
    told = ["what is the secret?", "f" * 64, '{"queries": ["who?"]}', "1234567890123456"]
    with ReuseLedger.open(file) as ledger:
        ledger.reserve(f"{told[0]} {told[1]}", told[2], int(told[3]), fresh=False).spend()
        one = ledger._hash("prompt", "p")
        assert one == ledger._hash("prompt", "p")
        assert one != ledger._hash("seed", "p")
    raw = b"".join(path.read_bytes() for path in file.parent.iterdir())
    assert not [text for text in told if text.encode() in raw]
    assert int(told[3]).to_bytes(7, "big") not in raw
    # Another ledger has another key: nothing can be looked up in two of them.
    with ReuseLedger() as other:
        assert other._hash("prompt", "p") != one
    with ReuseLedger.open(file) as again:
        assert again._hash("prompt", "p") == one


def test_a_file_that_is_no_database_is_refused_and_left_alone(file):
    file.write_text("notes of mine, long enough to be read as a header of something else entirely" * 20)
    before = file.read_bytes()
    with pytest.raises(LedgerError, match=r"no reuse ledger.*another file"):
        ReuseLedger.open(file)
    assert file.read_bytes() == before


def test_a_database_of_somebody_else_is_refused_and_left_alone(file):
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE invoices (total)")
    other.close()
    before = file.read_bytes()
    with pytest.raises(LedgerError, match="SQLite database, but no reuse ledger"):
        ReuseLedger.open(file)
    assert file.read_bytes() == before


def test_a_ledger_of_a_newer_version_is_refused(file, monkeypatch):
    monkeypatch.setattr(database, "VERSION", 2)
    ReuseLedger.open(file).close()
    monkeypatch.undo()
    with pytest.raises(LedgerError, match=r"format 2.*upgrade"):
        ReuseLedger.open(file)


def test_an_empty_file_becomes_a_ledger(file):
    file.touch()
    with ReuseLedger.open(file) as ledger:
        assert isinstance(ledger.reserve("p", "c", 7, fresh=False), Grant)


def test_a_damaged_ledger_is_refused(file):
    ReuseLedger.open(file).close()
    raw = bytearray(file.read_bytes())
    raw[100:] = b"\xff" * (len(raw) - 100)
    file.write_bytes(raw)
    with pytest.raises(LedgerError, match="another file"):
        ReuseLedger.open(file)


def test_a_place_where_no_file_can_be_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere" / "ledger.db"):
        with pytest.raises(LedgerError, match="a file in a folder that exists"):
            ReuseLedger.open(place)


def test_a_file_that_cannot_be_written_is_refused():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "ledger.db"
        ReuseLedger.open(file).close()
        file.chmod(0o444)
        folder.chmod(0o555)
        # Nothing stops the superuser: somebody else has to try.
        code = """
if os.geteuid() == 0:
    os.setuid(65534)
from entroprefill_rag.errors import LedgerError
for place in sys.argv[1:]:
    try:
        ReuseLedger.open(place)
    except LedgerError as error:
        print("made" if "cannot be made" in str(error) else "written" if "cannot be written" in str(error) else error)
"""
        code = "import entroprefill_rag.ledger, encodings.idna\n" + code
        assert python(code, file, folder / "new.db") == ["written", "made"]
        folder.chmod(0o755)


def test_a_file_that_stays_locked_is_an_error_in_the_end(file, monkeypatch):
    monkeypatch.setattr(database, "_PATIENCE", 0.2)
    with ReuseLedger.open(file) as ledger:
        grant = ledger.reserve("p", "c", 7, fresh=False)
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked by another process"):
            grant.spend()
        grant.release()
        other.execute("ROLLBACK")
        other.close()
        # What could not be given back then is given back now.
        assert ledger.reserve("p", "d", 7, fresh=False).attempt == 1
