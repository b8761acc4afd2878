"""The table of the tuning database, and how an older one is brought up to it."""

from __future__ import annotations

import sqlite3

from flash_helpers.kernels.problem import FORWARD
from flash_helpers.results.measurement import VALUES

SCHEMA = 2

KEY = (
    "gpu", "capability", "driver", "sources",
    "dtype", "d_head", "causal", "heads_per_sm", "queries", "keys", "kernel",
)  # fmt: skip
CREATE_1 = f"""CREATE TABLE measurement (
    gpu TEXT NOT NULL, capability TEXT NOT NULL, driver TEXT NOT NULL, sources TEXT NOT NULL,
    dtype TEXT NOT NULL, d_head INTEGER NOT NULL, causal INTEGER NOT NULL, heads_per_sm REAL NOT NULL,
    queries INTEGER NOT NULL, keys INTEGER NOT NULL, kernel TEXT NOT NULL,
    status TEXT NOT NULL, reason TEXT NOT NULL, stage TEXT NOT NULL,
    milliseconds REAL, p20 REAL, p80 REAL, rounds INTEGER NOT NULL, error REAL,
    problem TEXT NOT NULL, facts TEXT NOT NULL,
    PRIMARY KEY ({", ".join(KEY)})
)"""
DIRECTION = f"direction TEXT NOT NULL DEFAULT '{FORWARD}'"
"""What schema 2 adds. It need not be part of the key: sources and kernel names differ between directions."""

# A file of schema 1 that can't be written is read as if it had the column.
VIEW_OF_1 = f"CREATE TEMP VIEW measurement AS SELECT *, '{FORWARD}' AS direction FROM main.measurement"

COLUMNS = (*KEY, "direction", *VALUES)
UPSERT = f"INSERT OR REPLACE INTO measurement ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
BUCKET_COLUMNS = ("dtype", "d_head", "causal", "heads_per_sm", "queries", "keys", "direction")
BUCKET = " AND ".join(f"{column} = ?" for column in BUCKET_COLUMNS)
DEVICE = "gpu = ? AND capability = ? AND driver = ?"


class OtherContentError(ValueError):
    """A database of something else, or of a later schema."""


def version_of(connection: sqlite3.Connection) -> int:
    """The number of the schema that a file says; 0: none."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def bring_up(connection: sqlite3.Connection) -> None:
    """Makes the table in an empty file, or gives one of schema 1 what it lacks, in one transaction.

    Raises:
        OtherContentError: the file holds something else.
        sqlite3.DatabaseError: it should hold the table of schema 1 and does not.
    """
    version = version_of(connection)
    if version == SCHEMA:
        return
    found = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL")]
    # A process of an earlier version may have been killed before it wrote the schema's number.
    if version not in (0, 1) or (version == 0 and found not in ([], [CREATE_1])):
        raise OtherContentError
    if version == 1 and CREATE_1 not in found:
        raise sqlite3.DatabaseError("the table of its schema is not there")
    with connection:
        connection.execute("BEGIN IMMEDIATE")  # which Python does not do by itself for these
        if not found:
            connection.execute(CREATE_1)
        connection.execute(f"ALTER TABLE measurement ADD COLUMN {DIRECTION}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")


def is_read_only(error: Exception) -> bool:
    """Whether nothing can be written to the file or beside it, even when no other process writes."""
    if isinstance(error, sqlite3.Error):
        return "readonly" in str(error)
    return not isinstance(error, TimeoutError)
