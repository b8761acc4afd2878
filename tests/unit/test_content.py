"""Files that hold anything: no content, kind or size of a file reaches a call as another error."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flash_helpers import content, host_memory, messages, trust
from flash_helpers.benchmark.results import ResultFileError, Results, Row
from flash_helpers.benchmark.timing import Timing
from flash_helpers.cli import app
from flash_helpers.console.writable import NotWritableError, check_file
from flash_helpers.content import ContentError, read_json, read_text, seal, unseal
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.families import direction_of
from flash_helpers.problem import Problem
from flash_helpers.report.data import load_report
from flash_helpers.results import tables
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.database import NotATuningDatabaseError, TuningDatabase
from flash_helpers.results.device import TunedDevice, sources_digest
from flash_helpers.results.lookup import TuningResults
from flash_helpers.results.measurement import FINAL, Measurement
from flash_helpers.select.choice import attention_problem, chosen_kernels

H100, DRIVER = device_facts("H100"), "580.1"
PROBLEM = Problem(DType.BF16, 4, 16, 4096, 128)
DEVICE, BUCKET = TunedDevice.of(H100, DRIVER), Bucket.of_problem(PROBLEM, H100.sm_count)


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_said", set())


# ---------------------------------------------------------------- reading
@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "no JSON"), ("[" * 100_000, "too deeply"), ("9" * 5000, "no JSON"), ("\udcff", "no text")],
)
def test_wrong_content_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ContentError, match=said):
        read_json(path)


def test_only_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), Path("/dev/null"), tmp_path):
        with pytest.raises((ContentError, IsADirectoryError)):
            read_text(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ContentError, match="no regular file"):  # and does not wait for a writer
        read_text(tmp_path / "pipe")
    (tmp_path / "long").write_text("x" * 11)
    with pytest.raises(ContentError, match="more than the 10 bytes"):
        read_text(tmp_path / "long", 10)


def test_a_pipe_that_nobody_reads_is_no_place_for_results(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotWritableError, match="can't be written"):
        check_file(tmp_path / "pipe")


def test_a_seal_shows_any_change() -> None:
    values = {"a": [1, 2.5, None], "b": {"c": "ü"}}
    text = seal(values)
    assert unseal(text) == values
    for place in range(len(text)):
        for other in (text[:place], text[:place] + "7" + text[place + 1 :], text[:place] + text[place + 1 :]):
            try:
                found = unseal(other)
            except ContentError:
                continue
            assert found == values  # white space, or the same digit


# ---------------------------------------------------------------- the tuning database
def filled(path: Path) -> TuningDatabase:
    database = TuningDatabase(path)
    for place, kernel in enumerate(dict.fromkeys(chosen_kernels(PROBLEM, H100))):
        row = Measurement(kernel.short_form(), PROBLEM, stage=FINAL, milliseconds=1.0 + place, rounds=11)
        database.record(DEVICE, sources_digest(direction_of(kernel)), BUCKET, row)
    return database


DAMAGES = {
    "problem": ["", "{", "[]", "{}", "null", '{"dtype": "BF16"}', "[" * 100_000, b"\xff\xfe", None, 5],
    "facts": ["", "{", "[]", "null", "[" * 100_000, b"\xff"],
    "kernel": ["", "no kernel", b"\xff\x00", "(BF16, 128", 7],
    "milliseconds": ["fast", b"\xff", float("inf"), -1.0],
    "status": ["okk", ""],
    "stage": ["finale"],
    "rounds": ["many", 1.5],
    "error": ["small"],
    "dtype": ["BF17", "", b"\xff"],
    "d_head": ["wide", 0, -5, 1.5, b"\xff"],
    "causal": ["maybe", 2],
    "heads_per_sm": ["x", 0.0, -1.0, float("inf")],
    "queries": [0, -1, "many", 2**60],
    "keys": [0, "x", 1.5],
}


@pytest.mark.parametrize(("column", "value"), [(c, v) for c, values in DAMAGES.items() for v in values])
def test_a_damaged_row_costs_that_row_alone(
    tmp_path: Path, column: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    database = filled(tmp_path / "tuning.sqlite3")
    whole = TuningResults(database.path, DRIVER).ranked(attention_problem(PROBLEM), H100)
    assert "measured on this machine" in whole[0][1]
    with sqlite3.connect(database.path) as connection:
        best = connection.execute("SELECT kernel FROM measurement ORDER BY milliseconds").fetchone()[0]
        connection.execute("PRAGMA ignore_check_constraints = 1")
        try:
            connection.execute(f"UPDATE measurement SET {column} = ? WHERE kernel = ?", (value, best))
        except sqlite3.IntegrityError:
            connection.execute(f"UPDATE measurement SET {column} = '' WHERE kernel = ?", (best,))
    ranked = TuningResults(database.path, DRIVER).ranked(attention_problem(PROBLEM), H100)
    assert best not in [config.short_form() for config, _ in ranked]
    assert [entry for entry in ranked if "measured on this machine" in entry[1]] == whole[1:]
    assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize("change", ["DROP TABLE measurement", "ALTER TABLE measurement RENAME stage TO x"])
def test_a_database_without_its_columns_is_replaced_when_it_is_written(tmp_path: Path, change: str) -> None:
    database = filled(tmp_path / "tuning.sqlite3")
    with sqlite3.connect(database.path) as connection:
        connection.execute(change)
    assert "shipped" in TuningResults(database.path, DRIVER).ranked(attention_problem(PROBLEM), H100)[0][1]


def test_a_schema_whose_damage_can_not_be_told_in_text_is_moved_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = filled(tmp_path / "tuning.sqlite3")
    whole = database.path.read_bytes()
    assert b"PRIMARY KEY" in whole
    database.path.write_bytes(whole.replace(b"PRIMARY KEY", b"PRIMARY \xceEY"))
    ranked = TuningResults(database.path, DRIVER).ranked(attention_problem(PROBLEM), H100)
    assert "from the shipped table" in ranked[0][1]
    assert capsys.readouterr().err.count("is damaged") == 1
    assert database.devices() == []


def test_a_maker_that_is_killed_leaves_all_of_the_schema_or_nothing(tmp_path: Path) -> None:
    statements: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(statements.append)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", traced)
        filled(tmp_path / "tuning.sqlite3")
    (begin,) = (n for n, text in enumerate(statements) if text.startswith("BEGIN IMMEDIATE"))
    words = [text.split()[0] for text in statements[begin : begin + 5]]
    assert words == ["BEGIN", "CREATE", "ALTER", "PRAGMA", "COMMIT"]
    with contextlib.closing(connect(tmp_path / "tuning.sqlite3")) as connection:
        # What earlier versions left when they were killed: the table of schema 1 without its number.
        connection.execute("ALTER TABLE measurement DROP COLUMN direction")
        connection.execute("PRAGMA user_version = 0")
    assert TuningDatabase(tmp_path / "tuning.sqlite3").devices() == [DEVICE]


def test_a_file_of_the_users_is_never_moved_aside(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work" * 1000)
    with pytest.raises(NotATuningDatabaseError, match="left alone"):
        TuningDatabase(thesis).devices()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".txt"] == ["thesis.txt"]
    assert thesis.read_text().startswith("years of work")
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(NotATuningDatabaseError, match="is no file"):
            TuningDatabase(path).devices()


def test_a_database_that_others_can_write_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = filled(tmp_path / "mine" / "tuning.sqlite3")
    assert database.path.stat().st_mode & 0o777 == 0o600
    assert database.path.parent.stat().st_mode & 0o777 == 0o700
    for path in (database.path, database.path.parent):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(PermissionError, match=r"can be written by others .* FLASH_ATTENTION_TUNING_DB"):
            database.devices()
        for _ in range(2):
            ranked = TuningResults(database.path, DRIVER).ranked(attention_problem(PROBLEM), H100)
            assert "from the shipped table" in ranked[0][1]
        path.chmod(mode)
    assert capsys.readouterr().err.count("no tuning results of this machine are used") == 2
    assert database.devices() == [DEVICE]


def test_a_database_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = filled(tmp_path / "tuning.sqlite3")
    if os.geteuid() == 0:
        os.chown(database.path, 12345, 12345)
    else:
        monkeypatch.setattr(trust.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        database.devices()


def test_results_are_looked_for_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_helpers.results.database import default_path

    monkeypatch.delenv("FLASH_ATTENTION_TUNING_DB", raising=False)
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert default_path() == tmp_path / "cache" / "tuning-1.sqlite3"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---------------------------------------------------------------- tables
def shipped_document() -> dict[str, Any]:
    path = next(path for path in tables.FOLDER.glob("*.json") if "h100" in path.name)
    return {"name": path.name, **json.loads(path.read_text())}


@pytest.mark.parametrize(
    "value", [None, [], {}, 5, "x", {"bucket": {}}, {"bucket": None, "kernels": [], "without_time": []}]
)
def test_a_damaged_bucket_costs_that_bucket_alone(
    tmp_path: Path, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    document = shipped_document()
    path = tmp_path / document.pop("name")
    path.write_text(json.dumps(document))
    whole = tables.load_table(path).buckets
    document["buckets"][0] = value
    path.write_text(json.dumps(document))
    assert list(tables.load_table(path).buckets) == list(whole)[1:]
    assert capsys.readouterr().err.count("damaged entries") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("milliseconds", "1"), ("milliseconds", 0), ("milliseconds", -1.0), ("tflops", None), ("tflops", 1e999),
     ("kernel", 5), ("kernel", None)],
)  # fmt: skip
def test_a_damaged_measurement_costs_its_bucket_alone(tmp_path: Path, name: str, value: object) -> None:
    document = shipped_document()
    path = tmp_path / document.pop("name")
    document["buckets"][0]["kernels"][0][name] = value
    path.write_text(json.dumps(document))
    assert len(tables.load_table(path).buckets) == len(document["buckets"]) - 1


@pytest.mark.parametrize("name", ["schema", "gpu", "capability", "driver", "facts", "buckets"])
@pytest.mark.parametrize("value", [None, 5, [[]], {"a": 1}])
def test_a_table_of_another_shape_is_a_table_error(tmp_path: Path, name: str, value: object) -> None:
    document = shipped_document()
    path = tmp_path / document.pop("name")
    path.write_text(json.dumps({**document, name: value}))
    if (name, value) in (("buckets", [[]]), ("facts", {"a": 1})):  # of the right shape
        assert tables.load_table(path).device.gpu == document["gpu"]
        return
    with pytest.raises(tables.TableError, match=path.name):
        tables.load_table(path)


# ---------------------------------------------------------------- result files
def result_document() -> dict[str, Any]:
    row = Row("a", "kernel", PROBLEM, timings={"hot": Timing(1.0, 0.9, 1.1, 5)}, environment={"gpu": "x"})
    return Results([row], {"BF16": 700.0}).file().document()


@pytest.mark.parametrize(
    ("path", "value"),
    [(("rows",), 5), (("rows",), None), (("rows",), [5]), (("facts", "matrix_tflops"), []),
     (("facts", "matrix_tflops", "BF16"), "x"), (("facts", "matrix_tflops", "BF16"), 1e999),
     (("rows", 0, "implementation"), 5),
     (("rows", 0, "problem"), []),
     (("rows", 0, "problem", "n_heads"), "16"), (("rows", 0, "problem", "n_heads"), 1.5),
     (("rows", 0, "problem", "n_heads"), -1), (("rows", 0, "problem", "seq_len_q"), 10**400),
     (("rows", 0, "problem", "seq_q"), 8), (("rows", 0, "us"), 3),
     (("rows", 0, "kind"), "us"), (("units",), "us"),
     (("rows", 0, "problem", "causal"), "no"), (("rows", 0, "problem", "dtype"), None),
     (("rows", 0, "milliseconds"), []), (("rows", 0, "milliseconds", "hot"), 5),
     (("rows", 0, "milliseconds", "hot", "median"), "1"), (("rows", 0, "milliseconds", "hot", "median"), 0),
     (("rows", 0, "milliseconds", "hot", "median"), 1e999), (("rows", 0, "milliseconds", "hot", "p20"), None),
     (("rows", 0, "environment"), []), (("rows", 0, "gpu_state"), 3), (("rows", 0, "error"), "x"),
     (("rows", 0, "kernel"), None), (("rows", 0, "status"), []), (("rows", 0, "reason"), 5)],
)  # fmt: skip
def test_a_result_file_changed_by_hand_is_named(
    tmp_path: Path, path: tuple[str | int, ...], value: object
) -> None:
    document: Any = result_document()
    file = tmp_path / "result.json"
    file.write_text(json.dumps(document))
    assert Results.load(file).rows
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    file.write_text(json.dumps(document))
    with pytest.raises(ResultFileError, match=r"result\.json"):
        load_report([file])


@pytest.mark.parametrize("file", ["/dev/zero", "/dev/random", "."])
def test_a_report_of_no_file_ends_at_once_with_little_memory(file: str, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + (4 << 30), before[1]))
    try:
        result = CliRunner().invoke(app, ["report", file, "--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert result.exit_code == 2
    assert "can't be read as a result file" in result.stderr
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 500_000  # KB


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# ---------------------------------------------------------------- memory
def test_memory_that_only_caches_files_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_helpers import problem

    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CONTROL_GROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemFree: 5 kB\nMemAvailable: 700 kB\n")
    device: Any = type("Device", (), {"type": "cpu"})
    assert problem.free_bytes(device) == 700 * 1024
    (tmp_path / "memory.max").write_text("600000\n")
    (tmp_path / "memory.current").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 300000\n")
    assert problem.free_bytes(device) == 600_000 - (500_000 - 300_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert problem.free_bytes(device) == 700 * 1024


@pytest.mark.parametrize("values", [{"batch": 1.5}, {"heads": True}, {"causal": 1}, {"seq_len": "8"}])
def test_a_problem_is_made_of_whole_numbers(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        replace(PROBLEM, **values)


def test_limits_are_above_what_the_project_itself_writes() -> None:
    root = Path(__file__).parents[2]
    sizes = [path.stat().st_size for path in (root / "benchmarks" / "results").glob("*.json")]
    assert max(sizes) * 4 < content.MAX_BYTES
