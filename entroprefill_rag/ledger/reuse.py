"""The reuse ledger: who has looked at which draws (correction 1, decision 7).

An audit's draws are worth something only to somebody who has not seen what they show. The ledger remembers, for each
prompt of a model, how many attempts have read their draws, and under which configuration each seed was used:

- the same seed with the same configuration is a replay: same claim, no new attempt;
- the same seed with anything else changed is refused;
- a fresh seed is one attempt more, counted before the run, so that runs at the same time get different numbers.

An attempt counts from the moment its draws are about to be read, whatever happens then; before, it can be given back.
Nothing is kept but numbers and hashes under a random key.
"""

from __future__ import annotations

import hmac
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from entroprefill_rag.errors import ConfigError, LedgerError
from entroprefill_rag.ledger.database import connect, explained, secret_of

PROMPTS = 10_000
SEEDS_PER_PROMPT = 100
_STALE = 24 * 3600.0  # seconds; a reservation this old belongs to a process that has died

_Slot = tuple[bytes, bytes, bytes]  # hashes of prompt, seed and configuration
_Note = tuple[int, _Slot]  # who gives back, by process: a fork's copy of a grant is not a grant


@dataclass(frozen=True)
class Refused:
    """These draws may not be used.

    Attributes:
        why: ``"changed"``: they were seen under another configuration; ``"under_way"``: a run with another
            configuration is using them; ``"forgotten"``: whether they were seen is no longer known.
        attempt: the attempt they belong to (``"forgotten"``: the next one).
    """

    why: Literal["changed", "under_way", "forgotten"]
    attempt: int


class Grant:
    """Leave to use one seed on one prompt. One that is lost unspent is given back.

    Attributes:
        attempt: ``r``: one more than the highest attempt that counts or may yet count.
        replay: these draws were seen before, under this very configuration.
    """

    def __init__(self, ledger: ReuseLedger, slot: _Slot, attempt: int, *, replay: bool) -> None:
        self.attempt = attempt
        self.replay = replay
        self._ledger, self._slot = ledger, slot
        self._note: _Note = (os.getpid(), slot)
        # May run inside any other code, the ledger's own included: it only leaves a note.
        self._lost = weakref.finalize(self, ledger._given_back.append, self._note)
        self._lost.atexit = False
        if replay:
            self._lost.detach()

    def spend(self) -> None:
        """Note that the draws are about to be read: from now on the attempt counts.

        Raises:
            LedgerError: it cannot be noted; the draws must not be read then.
        """
        if self._lost.alive:
            self._ledger._spend(self._slot)
            self._lost.detach()

    def release(self) -> None:
        """Give an attempt back whose draws were not read; does nothing for one that was spent."""
        if self._lost.detach() is not None:
            self._ledger._given_back.append(self._note)
            # What cannot be written now is written with the next reservation.
            with suppress(LedgerError), self._ledger._transaction():
                pass


class ReuseLedger:
    """Remembers whose draws were seen. Bounded; safe to share between threads, backends and, as a file, processes.

    Beyond ``prompts`` prompts the one used longest ago is forgotten, and a later attempt at it counts as the first; a
    record can only speak of what the ledger still knows. Of one prompt, all attempts are counted and the last 100 seeds
    are kept.

    Args:
        prompts: most prompts remembered.

    Example:
        >>> with ReuseLedger.open("ledger.db") as ledger:  # doctest: +SKIP
        ...     backend = LocalBackend.from_pretrained("smollm2-135m", ledger=ledger)
    """

    def __init__(self, *, prompts: int = PROMPTS) -> None:
        self._begin(None, prompts)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, prompts: int = PROMPTS) -> ReuseLedger:
        """A ledger in a file, made (readable by its owner only) where there is none.

        Any number of processes on one machine may have it open. What was noted survives the end of a process; the last
        notes before a loss of power may be lost.

        Args:
            path: an SQLite file; its folder must exist.
            prompts: most prompts remembered.

        Raises:
            LedgerError: a file that is no ledger, cannot be written, or comes from a newer version.
        """
        made = cls.__new__(cls)
        made._begin(Path(path), prompts)
        return made

    def _begin(self, path: Path | None, prompts: int) -> None:
        if prompts < 1:
            raise ConfigError(f"a ledger must remember at least one prompt, got prompts={prompts}")
        self.path = path
        self._most = prompts
        self._lock = threading.Lock()
        self._given_back: deque[_Note] = deque()
        self._inherited: list[sqlite3.Connection] = []
        self._connection: sqlite3.Connection | None = None
        self._secret = secret_of(self._connect())

    # -- what a run asks ------------------------------------------------------------------------------------------

    def reserve(self, prompt: str, configuration: str, seed: int, *, fresh: bool) -> Grant | Refused:
        """Ask for leave to use a seed on a prompt.

        Args:
            prompt: names model and prompt.
            configuration: names everything else that could change the outcome.
            seed: of the draws.
            fresh: the seed has just come from the operating system; nobody can have seen its draws.

        Raises:
            LedgerError: the ledger is closed, or its file cannot be read or written.
        """
        key = self._hash("prompt", prompt)
        slot = (key, self._hash("seed", f"{key.hex()} {int(seed)}"), self._hash("configuration", configuration))
        with self._transaction() as sql:
            sql.execute("DELETE FROM uses WHERE spent = 0 AND since < ?", (time.time() - _STALE,))
            forgotten = self._touch(sql, key)
            known = sql.execute(
                "SELECT configuration, attempt, spent FROM uses WHERE prompt = ? AND seed = ?", slot[:2]
            ).fetchone()
            if known is not None:
                return self._again(sql, slot, *known)
            highest = sql.execute("SELECT COALESCE(MAX(attempt), 0) FROM uses WHERE prompt = ?", (key,)).fetchone()[0]
            attempt = highest + 1
            if forgotten and not fresh:
                return Refused("forgotten", attempt)
            sql.execute(
                "INSERT INTO uses (prompt, seed, configuration, attempt, since) VALUES (?, ?, ?, ?, ?)",
                (*slot, attempt, time.time()),
            )
            return Grant(self, slot, attempt, replay=False)

    def _again(self, sql: sqlite3.Connection, slot: _Slot, before: bytes, attempt: int, spent: int) -> Grant | Refused:
        """A seed that is known on this prompt."""
        if not hmac.compare_digest(before, slot[2]):
            return Refused("changed" if spent else "under_way", attempt)
        if not spent:
            sql.execute("UPDATE uses SET holders = holders + 1 WHERE prompt = ? AND seed = ?", slot[:2])
        return Grant(self, slot, attempt, replay=bool(spent))

    @property
    def remembered(self) -> int:
        """Prompts remembered."""
        with self._transaction() as sql:
            return int(sql.execute("SELECT COUNT(*) FROM prompts").fetchone()[0])

    def close(self) -> None:
        """Close the file; a ledger in memory forgets everything. Runs that ask a closed ledger prune nothing."""
        with suppress(LedgerError), self._transaction():
            pass
        with self._lock:
            if self._process == os.getpid():
                self._dropped()
            self._connection = None

    def __enter__(self) -> ReuseLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ReuseLedger({'in memory' if self.path is None else str(self.path)!r})"

    # -- what a grant asks ----------------------------------------------------------------------------------------

    def _spend(self, slot: _Slot) -> None:
        with self._transaction() as sql:
            spent = sql.execute(
                "UPDATE uses SET spent = 1 WHERE prompt = ? AND seed = ? AND configuration = ?", slot
            ).rowcount
            if not spent:
                raise LedgerError(
                    f"the reservation of this attempt is gone, as after {_STALE / 3600:g} hours of waiting; run again"
                )
            # The newest are kept, so that the highest number is always known.
            too_old = sql.execute(
                "DELETE FROM uses WHERE prompt = ? AND spent = 1 AND attempt <= "
                "(SELECT attempt FROM uses WHERE prompt = ? AND spent = 1 ORDER BY attempt DESC LIMIT 1 OFFSET ?)",
                (slot[0], slot[0], SEEDS_PER_PROMPT),
            ).rowcount
            if too_old:
                sql.execute("UPDATE prompts SET forgotten = 1 WHERE prompt = ?", (slot[0],))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _hash(self, kind: str, text: str) -> bytes:
        told = f"{kind}\0{text}".encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, told, "sha256")[:16]

    def _touch(self, sql: sqlite3.Connection, key: bytes) -> bool:
        """Note that a prompt is in use; whether seeds of it were forgotten."""
        sql.execute(
            "INSERT INTO prompts (prompt, used) VALUES (?, (SELECT COALESCE(MAX(used), 0) + 1 FROM prompts)) "
            "ON CONFLICT (prompt) DO UPDATE SET used = excluded.used",
            (key,),
        )
        too_many = sql.execute("SELECT COUNT(*) FROM prompts").fetchone()[0] - self._most
        if too_many > 0:
            sql.execute(
                "DELETE FROM prompts WHERE prompt IN (SELECT prompt FROM prompts AS old WHERE prompt <> ? AND "
                "NOT EXISTS (SELECT 1 FROM uses WHERE uses.prompt = old.prompt AND spent = 0) ORDER BY used LIMIT ?)",
                (key, too_many),
            )
        return bool(sql.execute("SELECT forgotten FROM prompts WHERE prompt = ?", (key,)).fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One step that happens whole or not at all, for all threads and processes."""
        with self._lock:
            sql = self._connected()
            try:
                sql.execute("BEGIN IMMEDIATE")
                noted = len(self._given_back)
                for index in range(noted):
                    process, slot = self._given_back[index]
                    if process == os.getpid():
                        _give_back(sql, slot)
                yield sql
                sql.execute("COMMIT")
            except sqlite3.Error as error:
                raise explained(self.path, error) from error
            finally:
                if sql.in_transaction:
                    sql.execute("ROLLBACK")
            for _ in range(noted):
                self._given_back.popleft()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            raise LedgerError("this ledger was closed; open it again and give it to a new backend")
        if self.path is not None and self._process != os.getpid():
            # SQLite must not be used across a fork; not even closed, which would drop the parent's locks.
            self._inherited.append(self._connection)
            self._dropped.detach()
            return self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        self._connection, self._process = connect(self.path), os.getpid()
        self._dropped = weakref.finalize(self, self._connection.close)
        self._dropped.atexit = False
        return self._connection


def _give_back(sql: sqlite3.Connection, slot: _Slot) -> None:
    """Take back one reservation, if it was not spent meanwhile."""
    sql.execute("UPDATE uses SET holders = holders - 1 WHERE prompt = ? AND seed = ? AND configuration = ?", slot)
    sql.execute("DELETE FROM uses WHERE prompt = ? AND spent = 0 AND holders < 1", slot[:1])
    # A prompt at which no draw was ever read need not be remembered.
    sql.execute(
        "DELETE FROM prompts WHERE prompt = ? AND NOT EXISTS (SELECT 1 FROM uses WHERE uses.prompt = prompts.prompt)",
        slot[:1],
    )
