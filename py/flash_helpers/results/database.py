"""Tuning results in one SQLite file that several processes may write.

What was measured together is one transaction: an interrupted tune loses what it was measuring, nothing
before. A damaged file is moved aside, never repaired and never fatal; of a damaged row only that row is lost.
A file that others can write is not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import filelock

from flash_helpers import environment
from flash_helpers.build.cache import KernelCache
from flash_helpers.build.errors import KernelCacheError
from flash_helpers.content import CONTENT_ERRORS
from flash_helpers.messages import say_once
from flash_helpers.results import schema
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.device import TunedDevice
from flash_helpers.results.measurement import FINAL, VALUES, Measurement, row_bucket, row_measurement
from flash_helpers.trust import make_private_folders, untrusted_reason

FILE_NAME = "tuning-1.sqlite3"  # later schemas read the rows of schema 1, so the file is the same
WRITE_TIMEOUT_S = 30.0  # how long another process' commit, a few milliseconds, is waited for
READ_TIMEOUT_S = 2.0  # reading may stand in the way of an attention call
_SUFFIX, _MAGIC = ".sqlite3", b"SQLite format 3\0"
SIDE_FILES = ("", "-wal", "-shm", "-journal")  # what SQLite keeps beside a file belongs to it


T = TypeVar("T")


class NotATuningDatabaseError(ValueError):
    """A file that holds something else; it is left alone."""


def default_path() -> Path:
    """``FLASH_ATTENTION_TUNING_DB``, else a file in the folder of compiled kernels."""
    if path := environment.tuning_db():
        return path
    cache = KernelCache()
    with contextlib.suppress(KernelCacheError):  # no room to write anything: results may still be read
        return cache.writable_root() / FILE_NAME
    return cache.root / FILE_NAME


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
                *_device_key(device), sources, *_bucket_key(bucket)[:-1], one.kernel, bucket.direction,
                one.status, one.reason, one.stage, one.milliseconds, one.p20, one.p80, one.rounds, one.error,
                json.dumps(one.problem.to_json()), json.dumps(one.facts),
            )
            for one in measured
        ]  # fmt: skip

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany(schema.UPSERT, rows)

        self._use(write)

    def measurements(self, device: TunedDevice, sources: Iterable[str], bucket: Bucket) -> list[Measurement]:
        """Everything known of a bucket: finalists first, then by time; what was not timed is last."""
        digests = list(sources)
        query = (
            f"SELECT kernel, {', '.join(VALUES)} FROM measurement "
            f"WHERE {schema.DEVICE} AND {schema.BUCKET} AND sources IN ({', '.join('?' * len(digests))}) "
            f"ORDER BY milliseconds IS NULL, stage = '{FINAL}' DESC, milliseconds, kernel"
        )
        arguments = (*_device_key(device), *_bucket_key(bucket), *digests)
        return self._sound(self._read(query, arguments), row_measurement)

    def buckets(self, device: TunedDevice, sources: Iterable[str]) -> list[Bucket]:
        """The buckets in which a kernel was timed on the device."""
        digests = list(sources)
        query = (
            f"SELECT DISTINCT {', '.join(schema.BUCKET_COLUMNS)} FROM measurement "
            f"WHERE {schema.DEVICE} AND milliseconds IS NOT NULL "
            f"AND sources IN ({', '.join('?' * len(digests))})"
        )
        return sorted(self._sound(self._read(query, (*_device_key(device), *digests)), row_bucket))

    def devices(self) -> list[TunedDevice]:
        """The devices that anything was measured on."""
        rows = self._read("SELECT DISTINCT gpu, capability, driver FROM measurement")
        return self._sound(rows, lambda row: TunedDevice(*row))

    def forget(self, device: TunedDevice, bucket: Bucket) -> None:
        """Removes everything known of a bucket on a device."""

        def remove(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute(
                    f"DELETE FROM measurement WHERE {schema.DEVICE} AND {schema.BUCKET}",
                    (*_device_key(device), *_bucket_key(bucket)),
                )

        if self.path.exists():
            self._use(remove)

    # ------------------------------------------------------------------ the file
    def check_writable(self) -> None:
        """Raises what ``record`` would: the file can't be opened or written, or others can write it."""
        self._use(lambda connection: connection.execute("BEGIN IMMEDIATE"), READ_TIMEOUT_S)

    def _read(self, query: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if not os.path.exists(self.path):
            return []
        return self._use(lambda connection: connection.execute(query, arguments).fetchall(), READ_TIMEOUT_S)

    def _sound(self, rows: Sequence[Sequence[Any]], parse: Callable[[Sequence[Any]], T]) -> list[T]:
        """What can be made of rows. Damaged ones are left out, which is said once."""
        found = []
        for row in rows:
            try:
                found.append(parse(row))
            except CONTENT_ERRORS:
                say_once(
                    f"damaged rows of the tuning database {self.path} are left out; what is tuned again "
                    "takes their place"
                )
        return found

    def _check_trusted(self) -> None:
        """Raises where somebody else can have written the file, or what SQLite keeps beside it."""
        for suffix in SIDE_FILES:
            path = Path(f"{self.path}{suffix}")
            if os.path.exists(path) and not path.is_file():
                raise NotATuningDatabaseError(
                    f"{path} is no file; set FLASH_ATTENTION_TUNING_DB to another place"
                )
            if reason := untrusted_reason(path):
                raise PermissionError(
                    f"tuning database {self.path}: {reason}. Forbid others to write it (chmod go-w) where it "
                    "is yours, or name another file with FLASH_ATTENTION_TUNING_DB"
                )

    def _use(self, action: Callable[[sqlite3.Connection], T], timeout: float = WRITE_TIMEOUT_S) -> T:
        """Does ``action`` with an open connection; once more with a new file if this one is damaged."""
        self._check_trusted()
        try:
            try:
                with self._open(timeout) as connection:
                    return action(connection)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if not _is_damage(error):
                    raise
                self._move_aside(error)
            with self._open(timeout) as connection:
                return action(connection)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise OSError(
                f"tuning database {self.path}: {error}. FLASH_ATTENTION_TUNING_DB names another file"
            ) from error

    @contextlib.contextmanager
    def _open(self, timeout: float) -> Iterator[sqlite3.Connection]:
        # A connection a use: none is carried over a fork, none is shared by threads. The journal is SQLite's
        # default, not a write-ahead log, which can't be read from a read-only folder or a network mount.
        if not os.path.exists(self.path):
            make_private_folders(self.path.parent)
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self.path, timeout=timeout)
        connection.text_factory = _text
        try:
            if (found := schema.version_of(connection)) != schema.SCHEMA:
                try:
                    self._create(connection)
                except (OSError, sqlite3.OperationalError) as error:
                    if found != 1 or not schema.is_read_only(error):
                        raise
                    connection.execute(schema.VIEW_OF_1)
            yield connection
        finally:
            connection.close()

    def _create(self, connection: sqlite3.Connection) -> None:
        """Brings the file to this schema, once, whoever comes first."""
        with self._lock():
            try:
                schema.bring_up(connection)
            except schema.OtherContentError as error:
                raise NotATuningDatabaseError(
                    f"{self.path} is a database, but not of tuning results with schema {schema.SCHEMA}; it "
                    "is left alone. Set FLASH_ATTENTION_TUNING_DB to another file"
                ) from error

    def _move_aside(self, error: Exception) -> None:
        """Renames a damaged file to the first free ``name.corrupt-N``, unless another process just did."""
        if not self._is_ours():
            raise NotATuningDatabaseError(
                f"{self.path} is no database ({error}); it is left alone. Set FLASH_ATTENTION_TUNING_DB to "
                "another file"
            )
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

    def _is_ours(self) -> bool:
        """Whether a file that SQLite can't read was a tuning database: by its name, or by how it begins."""
        with self.path.open("rb") as file:
            begin = file.read(len(_MAGIC))
        return self.path.suffix == _SUFFIX or begin == _MAGIC

    def _is_sound(self) -> bool:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=WRITE_TIMEOUT_S)) as connection:
                return bool(connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok")
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            return False

    def _lock(self) -> filelock.FileLock:
        return filelock.FileLock(self.path.with_name(f"{self.path.name}.lock"), timeout=WRITE_TIMEOUT_S)


def _is_damage(error: Exception) -> bool:
    """Subclasses name other troubles: locked, read-only, full. A table that lacks columns is damaged too.

    Messages of SQLite that quote damaged names can't be decoded.
    """
    if isinstance(error, UnicodeDecodeError):
        return True
    lacks = isinstance(error, sqlite3.OperationalError) and str(error).startswith("no such ")
    return type(error) is sqlite3.DatabaseError or lacks


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")  # what can't be read costs its row, not the query


def _device_key(device: TunedDevice) -> tuple[str, str, str]:
    return device.gpu, device.capability, device.driver


def _bucket_key(bucket: Bucket) -> tuple[Any, ...]:
    mask, lengths = int(bucket.causal), (bucket.queries, bucket.keys)
    return (bucket.dtype.name, bucket.d_head, mask, bucket.heads_per_sm, *lengths, bucket.direction)
