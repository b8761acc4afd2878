"""Tuning on a fake timer: what is measured, what is remembered, what is chosen from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flash_helpers.benchmark.correctness import reference
from flash_helpers.benchmark.implementations import Prepared
from flash_helpers.benchmark.timing import Measure, TimedCall
from flash_helpers.build.families import family_of
from flash_helpers.configs.dtype import DType
from flash_helpers.configs.kernel import ForwardKernel
from flash_helpers.kernel_configs import (
    device_facts,
    get_autotuning_kernel_configs,
    get_hopper_kernels_to_build,
)
from flash_helpers.problem import Problem
from flash_helpers.tune import (
    Bucket,
    Measurement,
    TunedDevice,
    TuningDatabase,
    TuningResults,
    lookup,
    tables,
    tuned_configs,
)
from flash_helpers.tune.database import ELIMINATED, FINAL, SCREENED
from flash_helpers.tune.device import present_sources, sources_digest
from flash_helpers.tune.halving import Plan, StageResult, successive_halving
from flash_helpers.tune.space import prune
from flash_helpers.tune.tuner import TunedProblem, Watcher, tune

A100 = device_facts("A100")
DEVICE = TunedDevice.of(A100, "580.1")
SMALL = Problem(DType.FP16, 1, 2, 64, 64)
CONFIGS = [c for c in get_autotuning_kernel_configs() if (c.dtype, c.d_head) == (DType.FP16, 64)]


class FakeTimer:
    """Gives each call the time that its function carries, and counts the measurements."""

    modes: tuple[str, ...] = ("kernel",)

    def __init__(self) -> None:
        self.measured: list[float] = []
        self.interrupt_after: int | None = None

    def estimate(self, timed: TimedCall) -> None:
        timed.repeats = 1

    def measure(self, mode: str) -> Measure:
        return self._measure

    def _measure(self, timed: TimedCall) -> float:
        if self.interrupt_after is not None and len(self.measured) >= self.interrupt_after:
            raise KeyboardInterrupt
        milliseconds: float = timed.call.milliseconds  # type: ignore[attr-defined]
        if milliseconds < 0:
            raise RuntimeError("no launch")
        self.measured.append(milliseconds)
        return milliseconds


@dataclass(frozen=True)
class FakeImplementation:
    """The right output, or a wrong one, and a time."""

    kernel: ForwardKernel
    milliseconds: float
    wrong: bool = False
    kind: str = "kernel"

    @property
    def name(self) -> str:
        return self.kernel.short_form()

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        o = reference(q, k, v, problem.causal) * (1.1 if self.wrong else 1.0)

        def call() -> Tensor:
            return o

        call.milliseconds = self.milliseconds  # type: ignore[attr-defined]
        return Prepared(call)


def milliseconds_of(kernel: ForwardKernel) -> float:
    """The earlier in the tuning space, the faster."""
    return 1.0 + CONFIGS.index(kernel.config) / 10


class Bench:
    """One machine with a database."""

    def __init__(self, folder: Path) -> None:
        self.database = TuningDatabase(folder / "tuning.sqlite3")
        self.timer = FakeTimer()
        self.compiled: list[list[str]] = []
        self.left_uncompiled: set[ForwardKernel] = set()
        self.refused: dict[ForwardKernel, str] = {}
        self.wrong: set[ForwardKernel] = set()
        self.times: Callable[[ForwardKernel], float] = milliseconds_of
        self.now = 0.0

    def compile_kernels(
        self, kernels: Iterable[ForwardKernel], target: int, *_: object
    ) -> tuple[set[ForwardKernel], dict[ForwardKernel, str]]:
        kernels = list(kernels)
        self.compiled.append([kernel.short_form() for kernel in kernels])
        assert target == 80
        return set(kernels) - self.left_uncompiled - set(self.refused), self.refused

    def implement(self, kernel: ForwardKernel) -> FakeImplementation:
        return FakeImplementation(kernel, self.times(kernel), kernel in self.wrong)

    def tune(self, problems: list[Problem] | None = None, **options: object) -> list[TunedProblem]:
        arguments = {
            "device": torch.device("cpu"), "facts": A100, "configs": CONFIGS, "database": self.database,
            "timer": self.timer, "implement": self.implement, "compile_kernels": self.compile_kernels,
            "driver": DEVICE.driver, "clock": lambda: self.now,
        }  # fmt: skip
        return tune(problems or [SMALL], **{**arguments, **options})  # type: ignore[arg-type]

    def rows(self, problem: Problem = SMALL) -> dict[str, tuple[str, str]]:
        found = self.database.measurements(DEVICE, present_sources(), Bucket.of_problem(problem, 108))
        return {m.kernel: (m.status, m.stage) for m in found}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# ---------------------------------------------------------------- buckets
def test_buckets_by_hand() -> None:
    headline = Bucket.of_problem(Problem(DType.FP16, 16, 16, 4096, 128, True), 132)
    # 256 heads over 132 SMs are 1.94: nearest to 2.
    assert headline == Bucket(DType.FP16, 128, True, 2.0, 4096, 4096)
    assert headline.label() == "fp16 d128 causal, 4096 queries, 2 heads per SM"
    assert Bucket.of_problem(Problem(DType.FP16, 1, 1, 1448, 64), 132).queries == 1024  # below 1024 * 2^0.5
    assert Bucket.of_problem(Problem(DType.FP16, 1, 1, 1449, 64), 132).queries == 2048
    assert Bucket.of(DType.BF16, 64, False, 1, 1, 10**6, 132).heads_per_sm == 1 / 16
    assert Bucket.of(DType.BF16, 64, False, 10**6, 0, 0, 132) == Bucket(DType.BF16, 64, False, 8.0, 1, 1)
    assert Bucket.from_json(json.loads(json.dumps(headline.to_json()))) == headline


def test_distance_counts_doublings_and_keeps_kinds_apart() -> None:
    bucket = Bucket(DType.FP16, 128, False, 2.0, 4096, 4096)
    assert bucket.distance(bucket) == 0
    assert bucket.distance(replace(bucket, queries=1024, keys=1024, heads_per_sm=4.0)) == 3
    assert bucket.distance(replace(bucket, causal=True)) == float("inf")
    assert bucket.distance(replace(bucket, queries=1)) == float("inf")


# ---------------------------------------------------------------- pruning and halving
def test_pruning_names_its_reasons_and_keeps_the_best() -> None:
    kept, pruned = prune(CONFIGS, replace(SMALL, batch=16, heads=16, seq_len=4096, seq_len_k=4096), A100)
    assert kept
    assert not pruned  # every configuration of the space fits an A100
    # 16 queries of 132 heads that share K and V: a block of 256 rows computes four times what one of 64 does.
    decode = Problem(DType.FP16, 1, 132, 16, 64, heads_kv=1, seq_len_k=4096)
    narrow, wide = (replace(CONFIGS[0], B_r=n, B_c=64, n_warps=n // 32) for n in (64, 256))
    huge = replace(CONFIGS[0], B_r=1024, B_c=512, n_warps=8)
    kept, pruned = prune([huge, wide, narrow], decode, A100)
    assert kept == [ForwardKernel(narrow)]
    reasons = {p.kernel.config: p.reason for p in pruned}
    assert "4.0 times the time of the best" in reasons[wide]
    assert "262144 bytes of shared memory" in reasons[huge]
    assert prune(CONFIGS, replace(SMALL, d_head=128), A100) == ([], [])


def calls_of(times: dict[str, float]) -> dict[str, TimedCall]:
    def make(milliseconds: float) -> TimedCall:
        def call() -> None: ...

        call.milliseconds = milliseconds  # type: ignore[attr-defined]
        return TimedCall(call)

    return {name: make(ms) for name, ms in times.items()}


def test_halving_spends_its_time_on_the_best() -> None:
    timer = FakeTimer()
    results: list[StageResult] = []
    calls = calls_of({f"k{n}": float(n) for n in range(1, 17)})
    assert successive_halving(calls, timer.measure("kernel"), Plan(2, 4, 11), results.append)
    rounds = {n: timer.measured.count(float(n)) for n in range(1, 17)}
    # 16, then the 8 best, then the 4 best: 2, 4, 11 rounds.
    assert all(rounds[n] == 2 for n in range(9, 17))
    assert all(rounds[n] == 6 for n in range(5, 9))
    assert all(rounds[n] == 17 for n in range(1, 5))
    last = {r.name: r.stage for r in results}
    assert [last[f"k{n}"] for n in range(1, 17)] == [FINAL] * 4 + [ELIMINATED] * 12


def test_halving_goes_on_without_what_raises_and_stops_in_time() -> None:
    timer = FakeTimer()
    results: list[StageResult] = []
    calls = calls_of({"a": 1.0, "bad": -1.0, "b": 2.0})
    assert successive_halving(calls, timer.measure("kernel"), Plan(), results.append)
    assert [(r.name, str(r.failure)) for r in results if r.failure] == [("bad", "no launch")]
    assert {r.name for r in results if r.stage == FINAL} == {"a", "b"}

    results.clear()
    calls = calls_of({f"k{n}": float(n) for n in range(1, 17)})
    complete = successive_halving(
        calls, timer.measure("kernel"), Plan(), results.append, out_of_time=lambda: True
    )
    assert not complete
    assert [(r.stage, r.timing.rounds) for r in results if r.timing] == [(SCREENED, 1)] * 16


# ---------------------------------------------------------------- tune
def test_the_fastest_right_kernel_wins_and_lookup_finds_it(bench: Bench) -> None:
    fastest, second = (ForwardKernel(c) for c in CONFIGS[:2])
    bench.wrong = {fastest}
    (tuned,) = bench.tune()
    assert tuned.state == "tuned"
    assert tuned.best is not None
    assert tuned.best.kernel == second.short_form()
    rows = bench.rows()
    assert rows[fastest.short_form()] == ("wrong", SCREENED)
    assert len(rows) == len(CONFIGS)
    found = lookup(tuned.bucket, DEVICE, bench.database)
    assert found is not None
    assert [k.kernel for k in found.kernels[:2]] == [second.short_form(), CONFIGS[2].short_form()]
    assert found.kernels[0].tflops == pytest.approx(SMALL.flop() / 1.1 / 1e9)
    assert fastest.short_form() not in {k.kernel for k in found.kernels}


def test_a_known_bucket_is_not_measured_again_unless_asked(bench: Bench) -> None:
    bench.tune()
    count = len(bench.timer.measured)
    (tuned,) = bench.tune()
    assert (tuned.state, len(bench.timer.measured)) == ("known", count)
    assert tuned.best is not None
    bench.times = lambda kernel: 10.0 - milliseconds_of(kernel)
    (tuned,) = bench.tune(fresh=True)
    assert tuned.best is not None
    assert tuned.best.kernel == CONFIGS[-1].short_form()


def test_an_interrupted_tune_resumes_where_it_was(bench: Bench) -> None:
    first_stage = 2 * len(CONFIGS)
    bench.timer.interrupt_after = first_stage + 3
    with pytest.raises(KeyboardInterrupt):
        bench.tune()
    stages = [stage for _, stage in bench.rows().values()]
    assert stages.count(ELIMINATED) == len(CONFIGS) - len(CONFIGS) // 2
    assert stages.count(SCREENED) == len(CONFIGS) // 2

    bench.timer.interrupt_after = None
    (tuned,) = bench.tune()
    assert len(bench.compiled[-1]) == len(CONFIGS) // 2  # the eliminated half is left alone
    assert tuned.state == "tuned"
    assert tuned.best is not None
    assert (tuned.best.kernel, tuned.best.stage) == (CONFIGS[0].short_form(), FINAL)


def test_an_interruption_in_the_second_bucket_keeps_the_first(bench: Bench) -> None:
    other = replace(SMALL, causal=True)
    ended: list[str] = []
    watcher = Watcher(on_end=lambda tuned: ended.append(tuned.state))

    def begin(bucket: Bucket, candidates: int) -> None:
        if bucket.causal:
            raise KeyboardInterrupt

    watcher.on_begin = begin
    with pytest.raises(KeyboardInterrupt):
        bench.tune([SMALL, other], watcher=watcher)
    assert ended == ["tuned"]
    assert [t.state for t in bench.tune([SMALL, other])] == ["known", "tuned"]


def test_new_kernels_are_compared_with_the_finalists(bench: Bench) -> None:
    bench.tune(configs=CONFIGS[2:])
    bench.tune()
    assert set(bench.compiled[-1]) == {c.short_form() for c in CONFIGS[:6]}
    found = lookup(Bucket.of_problem(SMALL, 108), DEVICE, bench.database)
    assert found is not None
    assert found.kernels[0].kernel == CONFIGS[0].short_form()


def test_budget_skips_what_it_does_not_reach(bench: Bench) -> None:
    watcher = Watcher(on_end=lambda tuned: setattr(bench, "now", 11.0))
    states = bench.tune([SMALL, replace(SMALL, causal=True)], budget=10.0, watcher=watcher)
    assert [t.state for t in states] == ["tuned", "skipped"]
    assert states[1].best is None


def test_kernels_that_were_not_compiled_in_time_are_left_for_later(bench: Bench) -> None:
    late = ForwardKernel(CONFIGS[0])
    bench.left_uncompiled = {late}
    (tuned,) = bench.tune()
    assert (tuned.state, tuned.reason) == ("partly", "1 kernels were not compiled in time")
    bench.left_uncompiled = set()
    (tuned,) = bench.tune()
    assert tuned.best is not None
    assert (tuned.state, tuned.best.kernel) == ("tuned", late.short_form())


def test_a_kernel_that_does_not_compile_is_remembered(bench: Bench) -> None:
    bench.refused = {ForwardKernel(CONFIGS[0]): "does not compile: error"}
    (tuned,) = bench.tune()
    assert bench.rows()[CONFIGS[0].short_form()][0] == "failed"
    assert tuned.best is not None
    assert tuned.best.kernel == CONFIGS[1].short_form()
    assert bench.tune()[0].state == "known"


# ---------------------------------------------------------------- results
def sizes(problem: Problem, **changes: object) -> SimpleNamespace:
    values = {
        "dtype": problem.dtype, "batch": problem.batch, "n_heads": problem.heads, "causal": problem.causal,
        "seq_len_q": problem.seq_len, "seq_len_k": problem.seq_len_k,
        "d_head": problem.d_head, "d_head_v": problem.d_head,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_results_for_selection(bench: Bench) -> None:
    results = TuningResults(bench.database.path, DEVICE.driver)
    assert results.best(sizes(SMALL), A100) is None  # type: ignore[arg-type]
    bench.tune()
    best = results.best(sizes(SMALL), A100)  # type: ignore[arg-type]
    assert best is not None
    config, reason = best
    assert config == CONFIGS[0]
    assert "measured on this machine" in reason
    near = results.best(sizes(SMALL, seq_len_q=200, seq_len_k=200), A100)  # type: ignore[arg-type]
    assert near is not None
    assert near[0] == CONFIGS[0]
    assert tuned_configs(DEVICE, bench.database) == [CONFIGS[0]]
    with pytest.raises(ValueError, match="run flash-attention tune"):
        tuned_configs(replace(DEVICE, driver="1.0"), bench.database)
    for changes in ({"seq_len_q": 2048, "seq_len_k": 2048}, {"d_head_v": 128}, {"causal": True}):
        assert results.best(sizes(SMALL, **changes), A100) is None  # type: ignore[arg-type]
    for other in (device_facts("H100"), replace(A100, name="NVIDIA A100 PCIe")):
        assert results.best(sizes(SMALL), other) is None  # type: ignore[arg-type]
    assert TuningResults(bench.database.path, "999.0").best(sizes(SMALL), A100) is None  # type: ignore[arg-type]


def test_a_family_that_was_made_for_the_device_is_not_outvoted_by_another(bench: Bench) -> None:
    h100 = device_facts("H100")
    device = TunedDevice.of(h100, DEVICE.driver)
    bucket = Bucket.of_problem(SMALL, h100.sm_count)
    hopper = next(
        k for k in get_hopper_kernels_to_build() if (k.config.dtype, k.config.d_head) == (DType.FP16, 64)
    )
    results = TuningResults(bench.database.path, DEVICE.driver)

    def record(kernel: ForwardKernel, milliseconds: float) -> None:
        measured = Measurement(kernel.short_form(), SMALL, stage=FINAL, milliseconds=milliseconds, rounds=11)
        bench.database.record(device, sources_digest(family_of(kernel)), bucket, measured)

    record(ForwardKernel(CONFIGS[0]), 1.0)
    assert results.best(sizes(SMALL), h100) is None  # type: ignore[arg-type]
    record(hopper, 2.0)  # it took part and is slower: now the other one counts
    best = results.best(sizes(SMALL), h100)  # type: ignore[arg-type]
    assert best is not None
    assert best[0] == CONFIGS[0]


def test_an_exported_table_is_used_where_the_database_has_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(tables.TableError, match="Run flash-attention tune first"):
        tables.export_table(DEVICE, tmp_path / "table.json", bench.database)
    bench.tune()
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "tables")
    written = tables.export_table(DEVICE, None, bench.database)
    assert written.name == "nvidia_a100_sxm4_80gb.json"
    table = tables.load_table(written)
    (entry,) = table.buckets.values()
    assert entry.families == {"ampere"}
    assert [name for name, _, _ in entry.kernels] == [c.short_form() for c in CONFIGS[:5]]

    elsewhere = TuningResults(tmp_path / "none.sqlite3", driver="600.0")
    best = elsewhere.best(sizes(SMALL), A100)  # type: ignore[arg-type]
    assert best is not None
    assert best[0] == CONFIGS[0]
    assert "shipped table of NVIDIA A100-SXM4-80GB, driver 580.1" in best[1]
    assert not (tmp_path / "none.sqlite3").exists()

    written.write_text("{}")
    with pytest.raises(tables.TableError, match="can't be read"):
        tables.load_table(written)


def test_the_shipped_tables_can_be_read_and_name_kernels() -> None:
    from flash_helpers.kernel_selection import select_kernels

    for path in tables.FOLDER.glob("*.json"):
        table = tables.load_table(path)
        for entry in table.buckets.values():
            for name, milliseconds, tflops in entry.kernels:
                (kernel,) = select_kernels(name)
                assert kernel.config.malformed_reason() is None
                assert milliseconds > 0
                assert tflops > 0


def test_reading_results_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, flash_helpers.tune; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
