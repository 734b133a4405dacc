"""The SQLite database under a ledger: in memory, or a private file that several processes share."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from pathlib import Path

from entroprefill_rag.errors import LedgerError

VERSION = 1
_APPLICATION = 0x45505246  # "EPRF": tells our files from other SQLite files
_PATIENCE = 10.0  # seconds to wait for another process

_SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    # forgotten: some seeds of this prompt are no longer kept; used: order of last use.
    "CREATE TABLE prompts (prompt BLOB PRIMARY KEY, forgotten INTEGER NOT NULL DEFAULT 0, used INTEGER NOT NULL) "
    "WITHOUT ROWID",
    "CREATE INDEX prompts_used ON prompts (used)",
    "CREATE TABLE uses (prompt BLOB NOT NULL REFERENCES prompts ON DELETE CASCADE, seed BLOB NOT NULL, "
    "configuration BLOB NOT NULL, attempt INTEGER NOT NULL, spent INTEGER NOT NULL DEFAULT 0, "
    "holders INTEGER NOT NULL DEFAULT 1, since REAL NOT NULL, PRIMARY KEY (prompt, seed)) WITHOUT ROWID",
    "CREATE INDEX uses_open ON uses (since) WHERE spent = 0",
)


def connect(path: Path | None) -> sqlite3.Connection:
    """Open the database, making it where there is none.

    Args:
        path: the file; None for one in memory.

    Raises:
        LedgerError: a file that is no ledger, cannot be written, or comes from a newer version.
    """
    if path is None:
        connection = _connection(":memory:")
        _make(connection)
        return connection
    _check_place(path)
    with contextlib.ExitStack() as undo:
        try:
            connection = _connection(path)
            undo.callback(connection.close)
            # Asked before anything is changed: the file may be somebody else's.
            if not _is_ledger(connection, path):
                _make(connection, path)
            _write_ahead(connection)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE meta SET value = value WHERE name = 'secret'")
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise explained(path, error) from error
        undo.pop_all()
    return connection


def secret_of(connection: sqlite3.Connection) -> bytes:
    """The key under which everything in the database is hashed."""
    return bytes(connection.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone()[0])


def explained(path: Path | None, error: sqlite3.Error) -> LedgerError:
    """What SQLite says, as an error with a way out."""
    place, text = f"the ledger {str(path)!r}" if path is not None else "the ledger in memory", str(error)
    if "not a database" in text or "malformed" in text or "no such" in text:
        return LedgerError(f"{place} is no reuse ledger ({text}); name another file, or a new one to begin with")
    if "readonly" in text or "unable to open" in text:
        return LedgerError(f"{place} cannot be written ({text}); every run has to be noted in it: make it writable")
    if "locked" in text or "busy" in text:
        return LedgerError(f"{place} was locked by another process for {_PATIENCE:g} s ({text}); try again")
    return LedgerError(f"{place} failed ({text}); see to its disk, or name another file")


def _connection(place: Path | str) -> sqlite3.Connection:
    # Used by one thread at a time, under the ledger's lock; transactions are begun by hand.
    made = sqlite3.connect(place, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    made.execute("PRAGMA foreign_keys = ON")
    return made


def _check_place(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise LedgerError(f"the ledger {str(path)!r} must be a file in a folder that exists")
    try:
        # Only where there is none: closing a descriptor of a database in use would drop its locks.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return
    except OSError as error:
        raise LedgerError(f"the ledger {str(path)!r} cannot be made: {error.strerror}; name another file") from error


def _is_ledger(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether it is a ledger of this version; False for an empty database.

    Raises:
        LedgerError: it is something else.
    """
    application, version, tables = (
        connection.execute(query).fetchone()[0]
        for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT COUNT(*) FROM sqlite_master")
    )
    if (application, version, tables) == (0, 0, 0):
        return False
    if application != _APPLICATION:
        raise LedgerError(f"{str(path)!r} is an SQLite database, but no reuse ledger; name another file")
    if version != VERSION:
        raise LedgerError(
            f"the ledger {str(path)!r} has format {version}, this version of entroprefill-rag reads format {VERSION}; "
            "upgrade, or name a new file (attempts are then counted from 1 again)"
        )
    return True


def _make(connection: sqlite3.Connection, path: Path | None = None) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have been first.
        if path is None or not _is_ledger(connection, path):
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('secret', ?)", (secrets.token_bytes(32),))
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Commit without waiting for the disk: what was noted survives the process, not always a loss of power."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            # SQLite does not wait here by itself, whatever its timeout.
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous = NORMAL")
