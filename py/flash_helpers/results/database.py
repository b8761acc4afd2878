"""Tuning results in one SQLite file that several processes may write.

What was measured together is one transaction: an interrupted tune loses what it was measuring, nothing
before. A damaged file is moved aside, never repaired and never fatal.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import filelock

from flash_helpers import environment
from flash_helpers.build.cache import KernelCache
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.device import TunedDevice

SCHEMA = 1
FILE_NAME = f"tuning-{SCHEMA}.sqlite3"
WRITE_TIMEOUT_S = 30.0  # how long another process' commit, a few milliseconds, is waited for
READ_TIMEOUT_S = 2.0  # reading may stand in the way of an attention call
SIDE_FILES = ("", "-wal", "-shm", "-journal")  # what SQLite keeps beside a file belongs to it

SCREENED, ELIMINATED, FINAL = "screened", "eliminated", "final"

_KEY = (
    "gpu", "capability", "driver", "sources",
    "dtype", "d_head", "causal", "heads_per_sm", "queries", "keys", "kernel",
)  # fmt: skip
_VALUES = ("status", "reason", "stage", "milliseconds", "p20", "p80", "rounds", "error", "problem", "facts")
_CREATE = f"""
CREATE TABLE IF NOT EXISTS measurement (
    gpu TEXT NOT NULL, capability TEXT NOT NULL, driver TEXT NOT NULL, sources TEXT NOT NULL,
    dtype TEXT NOT NULL, d_head INTEGER NOT NULL, causal INTEGER NOT NULL, heads_per_sm REAL NOT NULL,
    queries INTEGER NOT NULL, keys INTEGER NOT NULL, kernel TEXT NOT NULL,
    status TEXT NOT NULL, reason TEXT NOT NULL, stage TEXT NOT NULL,
    milliseconds REAL, p20 REAL, p80 REAL, rounds INTEGER NOT NULL, error REAL,
    problem TEXT NOT NULL, facts TEXT NOT NULL,
    PRIMARY KEY ({", ".join(_KEY)})
)"""
_UPSERT = (
    f"INSERT OR REPLACE INTO measurement ({', '.join(_KEY + _VALUES)}) "
    f"VALUES ({', '.join('?' * len(_KEY + _VALUES))})"
)
_BUCKET = "dtype = ? AND d_head = ? AND causal = ? AND heads_per_sm = ? AND queries = ? AND keys = ?"
_DEVICE = "gpu = ? AND capability = ? AND driver = ?"

T = TypeVar("T")


class NotATuningDatabaseError(ValueError):
    """A readable SQLite file that holds something else; it is left alone."""


@dataclass(frozen=True)
class Measurement:
    """What is known of one kernel in one bucket.

    Attributes:
        kernel: its short form.
        problem: the sizes it ran on.
        status: ``ok``, ``wrong`` or ``failed``.
        reason: why it is not ``ok``.
        stage: ``screened`` (to be measured more), ``eliminated`` (slower than half of the others), or
            ``final`` (measured together with the best).
        milliseconds, p20, p80: of a call, over ``rounds`` measurements; None when it was not timed.
        rounds: number of measurements.
        error: relative error against the float32 reference.
        facts: torch, CUDA, commit, time of the measurement.
    """

    kernel: str
    problem: Problem
    status: str = "ok"
    reason: str = ""
    stage: str = SCREENED
    milliseconds: float | None = None
    p20: float | None = None
    p80: float | None = None
    rounds: int = 0
    error: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        """10^12 FLOP a second by the median time."""
        return self.problem.flop() / self.milliseconds / 1e9 if self.milliseconds else None

    @property
    def done(self) -> bool:
        """Whether it needs no further measurement."""
        return self.status != "ok" or self.stage != SCREENED


def default_path() -> Path:
    """``FLASH_ATTENTION_TUNING_DB``, else a file in the folder of compiled kernels."""
    return environment.tuning_db() or KernelCache().writable_root() / FILE_NAME


class TuningDatabase:
    """The results in one file.

    Args:
        path: the file; ``None``: ``default_path()``. It is made by the first ``record``.

    Raises:
        NotATuningDatabaseError: on first use, when the file is a database of something else.
        OSError: on first use, when the file can't be opened or written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()

    def record(self, device: TunedDevice, sources: str, bucket: Bucket, *measured: Measurement) -> None:
        """Writes measurements, in place of earlier ones of the same kernels, and commits them together."""
        rows = [
            (
                *_device_key(device), sources, *_bucket_key(bucket), one.kernel,
                one.status, one.reason, one.stage, one.milliseconds, one.p20, one.p80, one.rounds, one.error,
                json.dumps(one.problem.to_json()), json.dumps(one.facts),
            )
            for one in measured
        ]  # fmt: skip

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany(_UPSERT, rows)

        self._use(write)

    def measurements(self, device: TunedDevice, sources: Iterable[str], bucket: Bucket) -> list[Measurement]:
        """Everything known of a bucket: finalists first, then by time; what was not timed is last."""
        digests = list(sources)
        query = (
            f"SELECT kernel, {', '.join(_VALUES)} FROM measurement "
            f"WHERE {_DEVICE} AND {_BUCKET} AND sources IN ({', '.join('?' * len(digests))}) "
            f"ORDER BY milliseconds IS NULL, stage = '{FINAL}' DESC, milliseconds, kernel"
        )
        arguments = (*_device_key(device), *_bucket_key(bucket), *digests)
        return [_measurement(row) for row in self._read(query, arguments)]

    def buckets(self, device: TunedDevice, sources: Iterable[str]) -> list[Bucket]:
        """The buckets in which a kernel was timed on the device."""
        digests = list(sources)
        query = (
            f"SELECT DISTINCT dtype, d_head, causal, heads_per_sm, queries, keys FROM measurement "
            f"WHERE {_DEVICE} AND milliseconds IS NOT NULL AND sources IN ({', '.join('?' * len(digests))})"
        )
        rows = self._read(query, (*_device_key(device), *digests))
        return sorted(Bucket(DType.from_string(row[0]), row[1], bool(row[2]), *row[3:]) for row in rows)

    def devices(self) -> list[TunedDevice]:
        """The devices that anything was measured on."""
        return [
            TunedDevice(*row)
            for row in self._read("SELECT DISTINCT gpu, capability, driver FROM measurement")
        ]

    def forget(self, device: TunedDevice, bucket: Bucket) -> None:
        """Removes everything known of a bucket on a device."""

        def remove(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute(
                    f"DELETE FROM measurement WHERE {_DEVICE} AND {_BUCKET}",
                    (*_device_key(device), *_bucket_key(bucket)),
                )

        if self.path.exists():
            self._use(remove)

    # ------------------------------------------------------------------ the file
    def _read(self, query: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if not self.path.exists():
            return []
        return self._use(lambda connection: connection.execute(query, arguments).fetchall(), READ_TIMEOUT_S)

    def _use(self, action: Callable[[sqlite3.Connection], T], timeout: float = WRITE_TIMEOUT_S) -> T:
        """Does ``action`` with an open connection; once more with a new file if this one is damaged."""
        try:
            try:
                with self._open(timeout) as connection:
                    return action(connection)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._move_aside(error)
            with self._open(timeout) as connection:
                return action(connection)
        except sqlite3.Error as error:
            raise OSError(
                f"tuning database {self.path}: {error}. FLASH_ATTENTION_TUNING_DB names another file"
            ) from error

    @contextlib.contextmanager
    def _open(self, timeout: float) -> Iterator[sqlite3.Connection]:
        # A connection a use: none is carried over a fork, none is shared by threads. The journal is SQLite's
        # default, not a write-ahead log, which can't be read from a read-only folder or a network mount.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=timeout)
        try:
            if _version(connection) != SCHEMA:
                self._create(connection)
            yield connection
        finally:
            connection.close()

    def _create(self, connection: sqlite3.Connection) -> None:
        """Makes the table in an empty file, once, whoever comes first."""
        with self._lock():
            version = _version(connection)
            if version == SCHEMA:
                return
            if version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise NotATuningDatabaseError(
                    f"{self.path} is a database, but not of tuning results with schema {SCHEMA}; it is left "
                    "alone. Set FLASH_ATTENTION_TUNING_DB to another file"
                )
            with connection:
                connection.execute(_CREATE)
                connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def _move_aside(self, error: sqlite3.DatabaseError) -> None:
        """Renames a damaged file to the first free ``name.corrupt-N``, unless another process just did."""
        with self._lock():
            if self._is_sound():
                return
            number = 1
            while (target := self.path.with_name(f"{self.path.name}.corrupt-{number}")).exists():
                number += 1
            for suffix in SIDE_FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{self.path}{suffix}", f"{target}{suffix}")
            print(
                f"flash_attention: the tuning database {self.path} is damaged ({error}); it is now {target}, "
                "and an empty one takes its place. Tune again to fill it",
                file=sys.stderr,
            )

    def _is_sound(self) -> bool:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=WRITE_TIMEOUT_S)) as connection:
                return bool(connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok")
        except sqlite3.DatabaseError:
            return False

    def _lock(self) -> filelock.FileLock:
        return filelock.FileLock(self.path.with_name(f"{self.path.name}.lock"), timeout=WRITE_TIMEOUT_S)


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Subclasses name other troubles: locked, read-only, full."""
    return type(error) is sqlite3.DatabaseError


def _device_key(device: TunedDevice) -> tuple[str, str, str]:
    return device.gpu, device.capability, device.driver


def _bucket_key(bucket: Bucket) -> tuple[Any, ...]:
    mask, lengths = int(bucket.causal), (bucket.queries, bucket.keys)
    return (bucket.dtype.name, bucket.d_head, mask, bucket.heads_per_sm, *lengths)


def _measurement(row: Sequence[Any]) -> Measurement:
    values = dict(zip(("kernel", *_VALUES), row, strict=True))
    problem, facts = (json.loads(values.pop(name)) for name in ("problem", "facts"))
    return Measurement(problem=Problem.from_json(problem), facts=facts, **values)
