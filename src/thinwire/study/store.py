"""Records in one SQLite file, each under the key of its trial.

A record is written in one transaction: a writer that is killed leaves the file as it was before. There is no
write-ahead log, so that the store is one file, also on network drives.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from types import TracebackType

from thinwire.errors import ThinwireError
from thinwire.study.record import Record, Trial

DEFAULT_PATH = Path("thinwire.sqlite")
APPLICATION = 0x74776972  #: "twir": marks a store among SQLite files
VERSION = 1
PATIENCE_S = 30.0
SCHEMA = "CREATE TABLE records (key TEXT PRIMARY KEY, record TEXT NOT NULL, digest TEXT NOT NULL)"


class Store:
    """A file of records, created if it does not exist.

    with Store("thinwire.sqlite") as store:
        store.put(record)
    """

    def __init__(self, path: str | Path = DEFAULT_PATH) -> None:
        self.path = Path(path)
        with self._explained():
            self._connection = sqlite3.connect(self.path, timeout=PATIENCE_S, isolation_level=None)
        try:
            with self._explained():
                self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def put(self, record: Record) -> None:
        """Store a record; it replaces an earlier one of the same trial."""
        written = record.to_json()
        row = (record.trial.key, written, _digest(written))
        with self._explained():
            self._connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", row)

    def get(self, trial: Trial) -> Record | None:
        """Return the record of a trial, or None."""
        records = self._select("WHERE key = ?", trial.key)
        return records[0] if records else None

    def forget(self, trials: Iterable[Trial]) -> None:
        """Remove the records of some trials; trials without a record are ignored."""
        with self._explained():
            self._connection.executemany(
                "DELETE FROM records WHERE key = ?", [(each.key,) for each in trials]
            )

    def records(self, study: str | None = None) -> list[Record]:
        """Return all records, or those of a study, sorted by trial."""
        chosen = [each for each in self._select() if study in (None, each.trial.study)]
        return sorted(chosen, key=lambda record: astuple(record.trial))

    def studies(self) -> list[str]:
        """Return the studies that have records."""
        return sorted({record.trial.study for record in self._select()})

    def _select(self, where: str = "", *values: str) -> list[Record]:
        with self._explained():
            rows = self._connection.execute(f"SELECT key, record, digest FROM records {where}", values)
            return [self._read(*row) for row in rows]

    def _read(self, key: str, written: str, digest: str) -> Record:
        """Return a record if its digest matches: SQLite itself would not notice changed bytes in a text."""
        if not isinstance(written, str) or _digest(written) != digest:
            raise sqlite3.DatabaseError(f"record {key} has changed since it was written")
        try:
            return Record.from_json(written)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ThinwireError(
                f"record {key} in {self.path} cannot be read ({_one_line(error)}); "
                "use the thinwire that wrote it, or name another file"
            ) from error

    def _open(self) -> None:
        """Check that the file is a store, or make an empty file one."""
        with self._transaction("DEFERRED"):  # one transaction: another process may be creating it
            application, version, tables = self._facts()
        if (application, version, tables) == (0, 0, 0):
            self._create()
            return
        if application != APPLICATION:
            raise ThinwireError(
                f"{self.path} is an SQLite file of another program; name another file for the store"
            )
        if version != VERSION:
            raise ThinwireError(
                f"{self.path} is a store of version {version}, this thinwire reads version {VERSION}; "
                "use the thinwire that wrote it, or name another file"
            )
        checked = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if checked != "ok":
            raise sqlite3.DatabaseError(checked)

    def _facts(self) -> tuple[int, int, int]:
        ask = self._connection.execute
        application = ask("PRAGMA application_id").fetchone()[0]
        version = ask("PRAGMA user_version").fetchone()[0]
        return application, version, ask("SELECT count(*) FROM sqlite_master").fetchone()[0]

    def _create(self) -> None:
        """Create the table in one transaction, and only once if two processes start at the same time."""
        with self._transaction("IMMEDIATE"):
            if not self._facts()[2]:
                self._connection.execute(SCHEMA)
                self._connection.execute(f"PRAGMA application_id = {APPLICATION}")
                self._connection.execute(f"PRAGMA user_version = {VERSION}")

    @contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        self._connection.execute(f"BEGIN {kind}")
        yield
        self._connection.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into errors that say what to do."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise ThinwireError(
                f"cannot use the store {self.path}: {error}; "
                "check that its folder exists and is writable, and that no other program locks the file"
            ) from error
        except sqlite3.DatabaseError as error:
            raise ThinwireError(
                f"{self.path} is damaged or not a store ({_one_line(error)}); "
                "move it away to start a new one, or name another file"
            ) from error


def _digest(written: str) -> str:
    return hashlib.sha256(written.encode()).hexdigest()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
