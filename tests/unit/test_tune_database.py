"""The tuning database: keys, several processes, damage, and what is not ours."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flash_helpers.kernel_configs import device_facts
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem
from flash_helpers.results.database import NotATuningDatabaseError, default_path
from flash_helpers.results.measurement import FINAL, SCREENED
from flash_helpers.tune import Bucket, Measurement, TunedDevice, TuningDatabase, TuningResults

PROBLEM = Problem(DType.BF16, 2, 8, 1024, 128, True)
BUCKET = Bucket.of_problem(PROBLEM, 132)
DEVICE = TunedDevice("NVIDIA H100 80GB HBM3", "9.0", "580.1")


def measured(kernel: str, milliseconds: float | None, stage: str = FINAL, status: str = "ok") -> Measurement:
    return Measurement(kernel, PROBLEM, status, "", stage, milliseconds, 0.9, 1.1, 11, 2e-4, {"torch": "2.9"})


def test_everything_comes_back_finalists_first(tmp_path: Path) -> None:
    database = TuningDatabase(tmp_path / "folder" / "t.sqlite3")
    assert database.measurements(DEVICE, ["a"], BUCKET) == []
    assert not database.path.parent.exists()  # reading makes nothing
    rows = [
        measured("slow", 2.0), measured("screened", 0.5, SCREENED), measured("fast", 1.0),
        replace(measured("bad", None, SCREENED, "wrong"), reason="relative error 1"),
    ]  # fmt: skip
    for row in rows:
        database.record(DEVICE, "a", BUCKET, row)
    found = database.measurements(DEVICE, ["a", "b"], BUCKET)
    assert [m.kernel for m in found] == ["fast", "slow", "screened", "bad"]
    assert found[0] == rows[2]
    assert [m.done for m in found] == [True, True, False, True]
    assert database.buckets(DEVICE, ["a"]) == [BUCKET]
    assert database.devices() == [DEVICE]

    database.record(DEVICE, "a", BUCKET, measured("slow", 0.7))
    assert database.measurements(DEVICE, ["a"], BUCKET)[0].milliseconds == 0.7


@pytest.mark.parametrize(
    "other",
    [
        (replace(DEVICE, driver="590.1"), ["a"], BUCKET),
        (replace(DEVICE, gpu="NVIDIA A100"), ["a"], BUCKET),
        (DEVICE, ["changed sources"], BUCKET),
        (DEVICE, ["a"], replace(BUCKET, causal=False)),
        (DEVICE, ["a"], replace(BUCKET, heads_per_sm=1.0)),
    ],
)
def test_results_count_only_where_they_were_measured(
    tmp_path: Path, other: tuple[TunedDevice, list[str], Bucket]
) -> None:
    database = TuningDatabase(tmp_path / "t.sqlite3")
    database.record(DEVICE, "a", BUCKET, measured("kernel", 1.0))
    assert database.measurements(*other) == []


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_tune_database import *
database = TuningDatabase(Path(sys.argv[1]))
for number in range(60):
    database.record(DEVICE, "a", BUCKET, measured(f"{{sys.argv[2]}}-{{number}}", 1.0 + number))
"""


def start_writer(path: Path, name: str) -> subprocess.Popen[str]:
    code = WRITER.format(tests=str(Path(__file__).parent))
    return subprocess.Popen([sys.executable, "-c", code, path, name], stderr=subprocess.PIPE, text=True)


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    writers = [start_writer(path, name) for name in ("a", "b")]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert (writer.returncode, errors) == (0, "")
    names = {m.kernel for m in TuningDatabase(path).measurements(DEVICE, ["a"], BUCKET)}
    assert names == {f"{name}-{number}" for name in ("a", "b") for number in range(60)}


def test_a_killed_writer_loses_nothing_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    database = TuningDatabase(path)
    database.record(DEVICE, "a", BUCKET, measured("before", 1.0))
    writer = start_writer(path, "a")
    while len(database.measurements(DEVICE, ["a"], BUCKET)) < 5:
        assert writer.poll() is None or writer.returncode == 0
    writer.kill()
    writer.wait()
    count = len(database.measurements(DEVICE, ["a"], BUCKET))
    database.record(DEVICE, "a", BUCKET, measured("after", 1.0))
    assert len(database.measurements(DEVICE, ["a"], BUCKET)) == count + 1
    assert not list(tmp_path.glob("*.corrupt-*"))


def overwrite_everything(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 100)


def overwrite_a_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = os.urandom(4096)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [overwrite_everything, overwrite_a_page])
def test_a_damaged_file_is_moved_aside_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: object
) -> None:
    path = tmp_path / "t.sqlite3"
    database = TuningDatabase(path)
    for number in (1, 2):
        for kernel in range(50):
            database.record(DEVICE, "a", BUCKET, measured(f"kernel {kernel}", 1.0))
        damage(path)  # type: ignore[operator]
        damaged = path.read_bytes()
        if number == 1:
            database.record(DEVICE, "a", BUCKET, measured("new", 1.0))
            assert [m.kernel for m in database.measurements(DEVICE, ["a"], BUCKET)] == ["new"]
        else:
            assert database.measurements(DEVICE, ["a"], BUCKET) == []
        aside = tmp_path / f"t.sqlite3.corrupt-{number}"
        assert aside.read_bytes() == damaged
        said = capsys.readouterr().err
        assert str(aside) in said
        assert said.count("is damaged") == 1


def test_a_database_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE letters (text)")
    with pytest.raises(NotATuningDatabaseError, match="FLASH_ATTENTION_TUNING_DB"):
        TuningDatabase(path).record(DEVICE, "a", BUCKET, measured("kernel", 1.0))
    assert sqlite3.connect(path).execute("SELECT count(*) FROM letters").fetchone() == (0,)
    # Selection goes on with the shipped table, and says so once.
    results = TuningResults(path, driver="580.1")
    problem = type("Sizes", (), {
        "dtype": DType.BF16, "batch": 4, "n_heads": 16, "seq_len_q": 4096, "seq_len_k": 4096,
        "d_head": 128, "d_head_v": 128, "causal": False, "direction": "forward",
    })()  # fmt: skip
    for _ in range(2):
        ranked = results.ranked(problem, device_facts("H100"))
        assert "from the shipped table" in ranked[0][1]
    assert capsys.readouterr().err.count("no tuning results of this machine are used") == 1


def test_a_busy_database_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    database = TuningDatabase(path)
    database.record(DEVICE, "a", BUCKET, measured("kernel", 1.0))
    holder = subprocess.Popen(
        [sys.executable, "-c",
         "import sqlite3, sys, time; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN EXCLUSIVE');"
         "print('held', flush=True); time.sleep(0.5); c.rollback()", path],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    database.record(DEVICE, "a", BUCKET, measured("late", 1.0))
    assert holder.wait(timeout=60) == 0
    assert len(database.measurements(DEVICE, ["a"], BUCKET)) == 2


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_ATTENTION_TUNING_DB", raising=False)
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))
    assert default_path() == tmp_path / "cache" / "tuning-1.sqlite3"
    monkeypatch.setenv("FLASH_ATTENTION_TUNING_DB", str(tmp_path / "mine.sqlite3"))
    assert default_path() == tmp_path / "mine.sqlite3"


# ---------------------------------------------------------------- directions
SCHEMA_1 = """CREATE TABLE measurement (
    gpu TEXT NOT NULL, capability TEXT NOT NULL, driver TEXT NOT NULL, sources TEXT NOT NULL,
    dtype TEXT NOT NULL, d_head INTEGER NOT NULL, causal INTEGER NOT NULL, heads_per_sm REAL NOT NULL,
    queries INTEGER NOT NULL, keys INTEGER NOT NULL, kernel TEXT NOT NULL,
    status TEXT NOT NULL, reason TEXT NOT NULL, stage TEXT NOT NULL,
    milliseconds REAL, p20 REAL, p80 REAL, rounds INTEGER NOT NULL, error REAL,
    problem TEXT NOT NULL, facts TEXT NOT NULL,
    PRIMARY KEY (gpu, capability, driver, sources, dtype, d_head, causal, heads_per_sm, queries, keys, kernel)
)"""
"""As versions before directions wrote it."""


def of_schema_1(path: Path, version: int = 1) -> TuningDatabase:
    """A database as an earlier version left it, with one row."""
    row = (
        "NVIDIA H100 80GB HBM3", "9.0", "580.1", "a", "BF16", 128, 1, BUCKET.heads_per_sm, BUCKET.queries,
        BUCKET.keys, "old", "ok", "", FINAL, 1.5, 0.9, 1.1, 11, 2e-4, json.dumps(PROBLEM.to_json()), "{}",
    )  # fmt: skip
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(SCHEMA_1)
        connection.execute(f"INSERT INTO measurement VALUES ({', '.join('?' * len(row))})", row)
        connection.execute(f"PRAGMA user_version = {version}")
    path.chmod(0o600)
    return TuningDatabase(path)


@pytest.mark.parametrize("version", [0, 1])
def test_rows_of_earlier_versions_are_of_forward_and_stay(tmp_path: Path, version: int) -> None:
    database = of_schema_1(tmp_path / "t.sqlite3", version)
    assert database.buckets(DEVICE, ["a"]) == [BUCKET]
    assert BUCKET.direction == "forward"
    assert [m.kernel for m in database.measurements(DEVICE, ["a"], BUCKET)] == ["old"]
    database.record(DEVICE, "a", BUCKET, measured("new", 1.0), measured("old", 2.0))
    assert [m.kernel for m in database.measurements(DEVICE, ["a"], BUCKET)] == ["new", "old"]


def test_an_earlier_file_is_read_where_nothing_can_be_written(tmp_path: Path, monkeypatch) -> None:
    database = of_schema_1(tmp_path / "t.sqlite3")
    before = database.path.read_bytes()
    connect = sqlite3.connect
    read_only = f"file:{database.path}?mode=ro"
    monkeypatch.setattr(sqlite3, "connect", lambda _, **options: connect(read_only, uri=True, **options))
    assert database.buckets(DEVICE, ["a"]) == [BUCKET]
    assert [m.kernel for m in database.measurements(DEVICE, ["a"], BUCKET)] == ["old"]
    with pytest.raises(OSError, match="cannot modify measurement because it is a view"):
        database.record(DEVICE, "a", BUCKET, measured("new", 1.0))
    assert database.path.read_bytes() == before


def test_a_table_of_an_earlier_version_that_is_gone_is_said(tmp_path: Path) -> None:
    database = of_schema_1(tmp_path / "t.sqlite3")
    with contextlib.closing(sqlite3.connect(database.path)) as connection, connection:
        connection.execute("DROP TABLE measurement")
    with pytest.raises(OSError, match="the table of its schema is not there"):
        database.devices()


def test_directions_are_kept_apart(tmp_path: Path) -> None:
    database = TuningDatabase(tmp_path / "t.sqlite3")
    sums = replace(BUCKET, direction="row_sums")
    database.record(DEVICE, "a", BUCKET, measured("kernel", 1.0))
    database.record(DEVICE, "b", sums, measured("sums", 2.0))
    assert database.buckets(DEVICE, ["a", "b"]) == [BUCKET, sums]
    assert [m.kernel for m in database.measurements(DEVICE, ["a", "b"], sums)] == ["sums"]
    database.forget(DEVICE, sums)
    assert database.buckets(DEVICE, ["a", "b"]) == [BUCKET]
    assert sums.label() == f"row_sums {BUCKET.label()}"


def test_a_bucket_of_a_table_without_a_direction_is_of_forward() -> None:
    values = BUCKET.to_json()
    assert values.pop("direction") == "forward"
    assert Bucket.from_json(values) == BUCKET
    with pytest.raises(ValueError, match="direction of a bucket is ''; allowed: a name such as 'forward'"):
        Bucket.from_json({**values, "direction": ""})
