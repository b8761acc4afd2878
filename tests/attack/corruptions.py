"""Files with damaged bytes: databases, tables, indices, facts, objects, libraries and result files."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from kills import BUCKET, DEVICE, KERNELS, Workshop, measured
from outcome import Outcome

from flash_helpers import messages
from flash_helpers.benchmark.results import ResultFileError, Results
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
from flash_helpers.results.tables import TableError
from flash_helpers.select.choice import attention_problem, chosen_kernels
from flash_helpers.select.select import select

H100 = device_facts("H100")
PROBLEM = Problem(DType.BF16, 4, 16, 4096, 128)
DRIVER = "580.1"
ROOT = Path(__file__).resolve().parents[2]


def damage(content: bytes, rng: random.Random) -> bytes:
    """The content with a few bytes changed, a part lost or repeated, or another part written over it."""
    if not content:
        return b"\0"
    changed = bytearray(content)
    place = rng.randrange(len(changed))
    length = rng.choice((1, 1, 1, 2, 16, 512, 4096))
    match rng.randrange(7):
        case 0 | 1 | 2:  # bits
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case 3:  # bytes
            changed[place : place + length] = rng.randbytes(min(length, len(changed) - place))
        case 4:  # the end is lost
            del changed[place:]
        case 5:  # a part is lost, or stands there twice
            part = changed[place : place + length]
            changed[place : place + length] = part * rng.choice((0, 2))
        case _:  # what editing by hand leaves
            words = (b"null", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'""', b"true", b"9" * 400, b"[" * 3000)
            changed[place : place + length] = rng.choice(words)
    return bytes(changed)


def corruptions(folder: Path, n: int, seed: int = 0) -> Outcome:
    """Damages ``n`` files, each kind in turn. No reader may raise anything but what it says it raises."""
    outcome = Outcome("corruption")
    attacks = _attacks(folder)
    for number in range(n):
        name = list(attacks)[number % len(attacks)]
        outcome.tried[name] += 1
        messages._said.clear()
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                attacks[name](random.Random(1_000_000 * seed + number))
        except Exception as error:
            outcome.fail(name, number, error)
        if said.getvalue().count("\n") > 3:
            outcome.fail(name, number, f"too many warnings: {said.getvalue()}")
    return outcome


def _attacks(folder: Path) -> dict[str, Callable[[random.Random], None]]:
    database = folder / "whole" / "tuning.sqlite3"
    _fill(TuningDatabase(database))
    shop = Workshop(folder / "shop")
    shop.build()
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"), key=lambda path: path.stat().st_size)
    results = [path for path in results if _is_result_file(path)][:4]
    table = max(tables.FOLDER.glob("*.json"), key=lambda path: path.stat().st_size)

    def built(part: str) -> Callable[[random.Random], None]:
        return lambda rng: _build_of_damaged(shop, part, rng)

    return {
        "tuning databases": lambda rng: _database(database.read_bytes(), folder / "d", rng),
        "tuned tables": lambda rng: _table(table.read_bytes(), table.name, folder / "t", rng),
        "result files": lambda rng: _result(rng.choice(results).read_bytes(), folder / "r.json", rng),
        "index entries": built("index/*/*.json"),
        "facts of objects": built("objects/*/facts.json"),
        "facts of libraries": built("libraries/*/facts.json"),
        "objects": built("objects/*/*.o"),
        "libraries": built("libraries/*/*.so"),
    }


def _fill(database: TuningDatabase) -> None:
    device, bucket = TunedDevice.of(H100, DRIVER), Bucket.of_problem(PROBLEM, H100.sm_count)
    for place, kernel in enumerate(dict.fromkeys(chosen_kernels(PROBLEM, H100))):
        name, time = kernel.short_form(), 1.0 + place
        row = Measurement(name, PROBLEM, stage=FINAL, milliseconds=time, p20=time, p80=time, rounds=11)
        database.record(device, sources_digest(direction_of(kernel)), bucket, row)
    database.record(DEVICE, "a", BUCKET, *(measured(f"kernel {n}") for n in range(40)))


def _database(content: bytes, folder: Path, rng: random.Random) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / "tuning.sqlite3"
    path.write_bytes(damage(content, rng))
    path.chmod(0o600)
    try:
        _select_with(TuningResults(path, DRIVER))
        with contextlib.suppress(OSError, NotATuningDatabaseError):
            TuningDatabase(path).devices()
        with contextlib.suppress(OSError, NotATuningDatabaseError):
            TuningDatabase(path).record(DEVICE, "a", BUCKET, measured("new"))
    finally:
        shutil.rmtree(folder)


def _table(content: bytes, name: str, folder: Path, rng: random.Random) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(damage(content, rng))
    shipped, tables.FOLDER = tables.FOLDER, folder
    tables._table_of.cache_clear()
    try:
        with contextlib.suppress(TableError):
            tables.load_table(folder / name)
        _select_with(TuningResults(shipped_only=True))
    finally:
        tables.FOLDER = shipped
        tables._table_of.cache_clear()


def _select_with(results: TuningResults) -> None:
    """A call's choice goes on, and takes a kernel that computes the problem."""
    for problem in (PROBLEM, Problem(DType.BF16, 1, 32, 1, 128, seq_len_k=8192)):
        choice = select(attention_problem(problem), H100, results)
        config = choice.kernel.config
        if config.dtype is not problem.dtype or config.d_head < problem.d_head:
            raise AssertionError(f"{config.short_form()} was chosen for {problem.label()}")
        if reason := config.infeasible_reason(H100):
            raise AssertionError(f"{config.short_form()} was chosen, but: {reason}")


def _is_result_file(path: Path) -> bool:
    try:
        return bool(Results.load(path).rows)
    except ResultFileError:
        return False


def _result(content: bytes, path: Path, rng: random.Random) -> None:
    path.write_bytes(damage(content, rng))
    with contextlib.suppress(ResultFileError):
        Results.load(path)
    with contextlib.suppress(ValueError):
        report = load_report([path])
        report.ratios(), report.ladder(), report.landscape()


def _build_of_damaged(shop: Workshop, part: str, rng: random.Random) -> None:
    path = rng.choice(sorted(shop.cache.store.glob(part)))
    path.write_bytes(damage(path.read_bytes(), rng))
    shop.build(KERNELS)
