"""Processes that are killed while they build, clear or write: nothing half made stays in use."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "building"))

from fake_nvcc import FakeNvcc
from outcome import Outcome
from small_root import make_small_root

from flash_helpers.build import KernelCache, build_kernels, find_library
from flash_helpers.build import compile as compile_module
from flash_helpers.build.errors import KernelCacheError
from flash_helpers.commands.cache import clear_cache
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel
from flash_helpers.problem import Problem
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.database import TuningDatabase
from flash_helpers.results.device import TunedDevice
from flash_helpers.results.measurement import FINAL, Measurement

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
KERNELS = [ForwardKernel(replace(CONFIG, B_c=16 * n)) for n in range(1, 5)]
PROBLEM = Problem(DType.BF16, 2, 8, 1024, 128, True)
BUCKET, DEVICE = Bucket.of_problem(PROBLEM, 132), TunedDevice("NVIDIA H100 80GB HBM3", "9.0", "580.1")


class Workshop:
    """A folder with a compiler that compiles nothing, small headers, a cache and a database."""

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.nvcc = FakeNvcc(folder / "toolkit", seconds=seconds).nvcc
        self.root = make_small_root(folder / "include")
        self.cache = KernelCache(folder / "cache")
        self.database = TuningDatabase(folder / "tuning.sqlite3")

    def build(self, kernels: list[ForwardKernel] = KERNELS) -> None:
        """Builds kernels, and finds whole libraries."""
        compile_module.find_nvcc = lambda: self.nvcc
        build_kernels(kernels, [80], jobs=2, cache=self.cache, include_root=self.root)
        for kernel in kernels:
            library = find_library(self.cache, kernel, 80, self.root)
            if library is None or library.read_text() != "half whole":
                raise AssertionError(
                    f"{kernel.short_form()} is built and not found, or half of it: {library}"
                )

    def record(self, n: int = 200) -> None:
        """Writes measurements, two in each transaction."""
        for number in range(n):
            pair = [measured(f"{name} {number}") for name in ("first", "second")]
            self.database.record(DEVICE, "a", BUCKET, *pair)

    def recorded(self) -> int:
        """The number of measurements that are there; both of each pair are, or none."""
        names = [m.kernel for m in self.database.measurements(DEVICE, ["a"], BUCKET)]
        firsts, seconds = ({n.split()[1] for n in names if n.startswith(w)} for w in ("first", "second"))
        if firsts != seconds:
            raise AssertionError(f"half of a transaction is there: {sorted(firsts ^ seconds)}")
        return len(names)


def measured(kernel: str) -> Measurement:
    return Measurement(kernel, PROBLEM, "ok", "", FINAL, 1.0, 0.9, 1.1, 11, 2e-4, {"torch": "2.9"})


def kills(folder: Path, n: int, seed: int = 0) -> Outcome:
    """Kills ``n`` processes of each kind of work at random moments.

    After each, the work has to be done in the same folder without a hitch.
    """
    outcome = Outcome("kill")
    work = {"building": _building, "building and clearing": _clearing, "writing results": _writing}
    for target, (name, attack) in enumerate(work.items()):
        for number in range(n):
            rng = random.Random(1_000_000 * seed + 1000 * target + number)
            outcome.tried[name] += 1
            try:
                attack(folder / f"{target}-{number}", rng)
            except Exception as error:
                outcome.fail(name, number, error)
    return outcome


def _building(folder: Path, rng: random.Random) -> None:
    shop = Workshop(folder, seconds=0.05)
    _kill(shop.build, rng.uniform(0.0, 0.8))
    _finishes(shop.build)


def _clearing(folder: Path, rng: random.Random) -> None:
    """One process builds, another clears the cache meanwhile, one of them is killed."""
    shop = Workshop(folder, seconds=0.02)
    builder = _start(lambda: _build_or_say_why_not(shop))
    clearer = _start(lambda: [_clear(shop.cache) for _ in range(20)])
    time.sleep(rng.uniform(0.0, 0.5))
    victim = rng.choice((builder, clearer))
    os.kill(victim.pid or 0, signal.SIGKILL)
    for process in (builder, clearer):
        process.join(60)
        if process.exitcode is None:
            process.kill()
            raise AssertionError("a process beside the killed one hangs")
    survivor = builder if clearer is victim else clearer
    if survivor.exitcode != 0:
        raise AssertionError(f"the process beside the killed one ended with {survivor.exitcode}")
    _finishes(shop.build)


def _build_or_say_why_not(shop: Workshop) -> None:
    """Twenty clearings may outrun every attempt to build; that is said."""
    try:
        compile_module.find_nvcc = lambda: shop.nvcc
        build_kernels(KERNELS, [80], jobs=2, cache=shop.cache, include_root=shop.root)
    except KernelCacheError as error:
        if "nothing" not in str(error):
            raise


def _clear(cache: KernelCache) -> None:
    clear_cache(cache)
    time.sleep(0.02)


def _writing(folder: Path, rng: random.Random) -> None:
    shop = Workshop(folder)
    before = 0
    for _ in range(2):
        _kill(shop.record, rng.uniform(0.0, 0.4))
        now = shop.recorded()
        if now < before:
            raise AssertionError(f"{before} measurements were there, {now} are left")
        before = now
    shop.database.record(DEVICE, "a", BUCKET, measured("last"))
    if list(folder.glob("*.corrupt-*")):
        raise AssertionError("the database was moved aside as damaged")


def _start(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_in_group, args=(work,))
    process.start()
    return process


def _in_group(work: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    work()


def _kill(work: Callable[[], object], after: float) -> None:
    process = _start(work)
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join()


def _finishes(work: Callable[[], object]) -> None:
    """The same work in a new process has to end well and soon: no lock of a dead one is waited for."""
    process = _start(work)
    process.join(120)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("the work after a kill hangs")
    if process.exitcode:
        raise AssertionError(f"the work after a kill ended with {process.exitcode}")
