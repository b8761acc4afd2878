"""Tuning on a fake timer: what is measured, what is remembered, what is chosen from it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_helpers import generation
from flash_helpers.benchmark.correctness import reference
from flash_helpers.benchmark.implementations import KernelImplementation, Prepared
from flash_helpers.benchmark.timing import Measure, TimedCall
from flash_helpers.kernel_configs import (
    device_facts,
    get_autotuning_kernel_configs,
    parse_kernel_name_into_config,
)
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import direction_of, family_of
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.problem import Problem, grid
from flash_helpers.results import lookup as lookup_module
from flash_helpers.results import tables
from flash_helpers.results.device import present_sources, sources_digest
from flash_helpers.results.lookup import NOISE
from flash_helpers.results.measurement import ELIMINATED, FINAL, SCREENED
from flash_helpers.select.choice import attention_problem, chosen_kernels
from flash_helpers.select.select import select
from flash_helpers.tune import (
    Bucket,
    Measurement,
    TunedDevice,
    TuningDatabase,
    TuningResults,
    lookup,
    tuned_configs,
)
from flash_helpers.tune.halving import Plan, StageResult, successive_halving
from flash_helpers.tune.outcome import TunedProblem, Watcher
from flash_helpers.tune.space import prune, tuning_space
from flash_helpers.tune.tuner import tune

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
        self.estimates = False

    def estimate(self, timed: TimedCall) -> None:
        timed.repeats = 1
        if self.estimates:
            timed.milliseconds = timed.call.milliseconds  # type: ignore[attr-defined]

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
            "driver": DEVICE.driver, "clock": lambda: self.now, "chosen": lambda problem, facts: [],
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
    found = re.fullmatch(r"the model expects (\d\.\d) times the time of the best", reasons[wide])
    assert found is not None
    assert 3 <= float(found[1]) <= 4
    assert "262144 bytes of shared memory" in reasons[huge]
    assert prune(CONFIGS, replace(SMALL, d_head=128), A100) == ([], [])


def calls_of(times: dict[str, float]) -> dict[str, TimedCall]:
    def make(milliseconds: float) -> TimedCall:
        def call() -> None: ...

        call.milliseconds = milliseconds  # type: ignore[attr-defined]
        return TimedCall(call)

    return {name: make(ms) for name, ms in times.items()}


def test_kernels_of_other_head_sizes_are_no_candidates() -> None:
    problem = Problem(DType.BF16, 4, 16, 4096, 192)
    kept, pruned = prune(tuning_space(), problem, device_facts("H100"))
    considered = [*kept, *(entry.kernel for entry in pruned)]
    assert considered
    assert {(k.config.d_head, k.config.d_head_v) for k in considered} == {(192, 192)}  # and not 192/128
    mixed = parse_kernel_name_into_config("(BF16, 192/128, 128, 64, 2wg): tma+kv_2+q_1+exact")
    assert not problem.fits(mixed)
    reason = KernelImplementation.of(mixed, problem).unavailable_reason(problem, torch.device("cpu"))
    assert reason == "the configuration is for BF16 and d_head 192/128"


def test_halving_spends_its_time_on_the_best() -> None:
    timer = FakeTimer()
    results: list[StageResult] = []
    calls = calls_of({f"k{n}": float(n) for n in range(1, 17)})
    assert successive_halving(
        calls, timer.measure("kernel"), Plan(first_rounds=2, finalists=4, final_rounds=11), results.extend
    )
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
    assert successive_halving(calls, timer.measure("kernel"), Plan(), results.extend)
    assert [(r.name, str(r.failure)) for r in results if r.failure] == [("bad", "no launch")]
    assert {r.name for r in results if r.stage == FINAL} == {"a", "b"}

    results.clear()
    calls = calls_of({f"k{n}": float(n) for n in range(1, 17)})
    complete = successive_halving(
        calls, timer.measure("kernel"), Plan(), results.extend, out_of_time=lambda: True
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
    passes: list[bool] = []
    watcher = Watcher(on_end=lambda tuned: ended.append(tuned.state))

    def begin(bucket: Bucket, candidates: int) -> None:
        passes.append(bucket.causal)
        if len(passes) == 4:
            raise KeyboardInterrupt

    watcher.on_begin = begin
    with pytest.raises(KeyboardInterrupt):
        bench.tune([SMALL, other], watcher=watcher)
    assert passes == [False, True, False, True]  # all buckets a little before one is finished
    assert ended == ["tuned"]
    assert [t.state for t in bench.tune([SMALL, other])] == ["known", "tuned"]


def test_new_kernels_are_compared_with_the_finalists(bench: Bench) -> None:
    bench.tune(configs=CONFIGS[2:])
    bench.tune()
    assert set(bench.compiled[-1]) == {c.short_form() for c in CONFIGS[:6]}
    found = lookup(Bucket.of_problem(SMALL, 108), DEVICE, bench.database)
    assert found is not None
    assert found.kernels[0].kernel == CONFIGS[0].short_form()


def test_a_budget_leaves_every_bucket_a_winner_before_it_ranks_one(bench: Bench) -> None:
    problems = [SMALL, replace(SMALL, causal=True)]
    watcher = Watcher(on_end=lambda tuned: setattr(bench, "now", 11.0))
    states = bench.tune(problems, budget=10.0, watcher=watcher)
    assert [t.state for t in states] == ["tuned", "partly"]
    assert states[1].reason == "the budget is spent"
    assert states[1].best is not None
    assert states[1].best.kernel == ForwardKernel(CONFIGS[0], ForwardTraits(causal=True)).short_form()
    assert states[1].best.stage == SCREENED
    assert [t.state for t in bench.tune(problems)] == ["known", "tuned"]


def test_budget_skips_what_it_does_not_reach(bench: Bench) -> None:
    watcher = Watcher(on_screened=lambda tuned: setattr(bench, "now", 11.0))
    states = bench.tune([SMALL, replace(SMALL, causal=True)], budget=10.0, watcher=watcher)
    assert [t.state for t in states] == ["partly", "skipped"]
    assert states[1].best is None


def test_a_budget_of_0_measures_and_compiles_nothing(bench: Bench) -> None:
    assert [t.state for t in bench.tune(budget=0)] == ["skipped"]
    assert (bench.compiled, bench.timer.measured) == ([], [])
    bench.tune()
    (tuned,) = bench.tune(budget=0)
    assert tuned.state == "known"
    assert tuned.best is not None


def test_all_buckets_have_compiled_kernels_when_there_is_no_time_for_all(bench: Bench) -> None:
    bench.tune([SMALL, replace(SMALL, causal=True)])
    assert [" | causal" in name for name in bench.compiled[0][:4]] == [False, True, False, True]


def test_what_the_first_estimate_shows_to_be_slow_is_measured_no_further(bench: Bench) -> None:
    bench.timer.estimates = True
    (tuned,) = bench.tune()
    assert tuned.state == "tuned"
    limit = Plan().slow * min(milliseconds_of(ForwardKernel(c)) for c in CONFIGS)
    slow = {c for c in CONFIGS if milliseconds_of(ForwardKernel(c)) > limit}
    assert 0 < len(slow) < len(CONFIGS)
    assert max(bench.timer.measured) <= limit
    assert {m.kernel for m in tuned.results if m.rounds == 1} == {ForwardKernel(c).short_form() for c in slow}


def test_the_chosen_kernels_are_measured_besides(bench: Bench) -> None:
    bench.times = lambda kernel: 1.0
    (tuned,) = bench.tune(configs=CONFIGS[:2], chosen=chosen_kernels)
    names = {kernel.short_form() for kernel in chosen_kernels(SMALL, A100)}
    assert names
    assert {m.kernel for m in tuned.results} == names | {ForwardKernel(c).short_form() for c in CONFIGS[:2]}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d_head", [64, 128])
@pytest.mark.parametrize("name", ["A100", "RTX4090", "H100"])
def test_whatever_is_asked_of_a_bucket_its_choice_is_measured(name: str, d_head: int, causal: bool) -> None:
    """Else results would not count: every length of the bucket, and an LSE."""
    facts = device_facts(name)
    for middle, dtype, lse in itertools.product((512, 1024, 4096), DType, (False, True)):
        bucket = Bucket.of(dtype, d_head, causal, 512, middle, middle, facts.sm_count)
        measured = chosen_kernels(Problem(dtype, 16, 32, middle, d_head, causal), facts)
        for length in (int(middle * 0.72), middle, int(middle * 1.41)):
            problem = Problem(dtype, 16, 32, length, d_head, causal)
            assert Bucket.of_problem(problem, facts.sm_count) == bucket
            choice = select(replace(attention_problem(problem), lse=lse), facts).kernel
            assert ForwardKernel(choice.config, ForwardTraits(causal=causal)) in measured


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
def sizes(problem: Problem, **changes: object) -> Any:
    values = {
        "dtype": problem.dtype, "batch": problem.batch, "n_heads": problem.heads, "causal": problem.causal,
        "seq_len_q": problem.seq_len, "seq_len_k": problem.seq_len_k,
        "d_head": problem.d_head, "d_head_v": problem.d_head, "direction": problem.direction,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_results_for_selection(bench: Bench) -> None:
    def ranked(problem: Any, facts: DeviceFacts = A100, chosen: ForwardConfig | None = None) -> list:
        results = TuningResults(bench.database.path, DEVICE.driver)
        return [config for config, _ in results.ranked(problem, facts, chosen)]

    before = TuningResults(bench.database.path, DEVICE.driver)
    assert before.ranked(sizes(SMALL), A100) == []
    bench.tune()
    assert before.ranked(sizes(SMALL), A100) == []  # what is written later does not count
    (first, text), *_ = TuningResults(bench.database.path, DEVICE.driver).ranked(sizes(SMALL), A100)
    assert first == CONFIGS[0]
    assert "measured on this machine" in text
    assert ranked(sizes(SMALL))[:3] == CONFIGS[:3]
    # First what is ahead of the default (1.0 against 1.1 ms), then the default, then the others.
    assert ranked(sizes(SMALL), chosen=CONFIGS[1])[:3] == CONFIGS[:3]
    assert ranked(sizes(SMALL), chosen=CONFIGS[0])[:2] == CONFIGS[:2]
    assert ranked(sizes(SMALL), chosen=CONFIGS[2])[:4] == CONFIGS[:4]
    # A lead of 0.9 % is noise, one of 1 % counts.
    for step, order in ((0.009, [1, 0, 2]), (0.0101, [0, 1, 2])):
        bench.times = lambda kernel, step=step: 1.0 + step * CONFIGS.index(kernel.config)  # type: ignore[misc]
        bench.tune(fresh=True)
        assert ranked(sizes(SMALL), chosen=CONFIGS[1])[:3] == [CONFIGS[n] for n in order]
    unmeasured = replace(CONFIGS[0], B_r=256, n_warps=8)
    assert ranked(sizes(SMALL), chosen=unmeasured) == []
    assert tuned_configs(DEVICE, bench.database) == [CONFIGS[0]]
    with pytest.raises(ValueError, match="run flash-attention tune"):
        tuned_configs(replace(DEVICE, driver="1.0"), bench.database)
    for changes in (
        {"seq_len_q": 200, "seq_len_k": 200},  # the next bucket
        {"batch": 200},
        {"seq_len_q": 2048, "seq_len_k": 2048},
        {"d_head_v": 128},
        {"causal": True},
    ):
        assert ranked(sizes(SMALL, **changes)) == []
    for other in (device_facts("H100"), replace(A100, name="NVIDIA A100 PCIe")):
        assert ranked(sizes(SMALL), other) == []
    assert TuningResults(bench.database.path, "999.0").ranked(sizes(SMALL), A100) == []


PREFILL = AttentionProblem(DType.BF16, 4, 4096, 4096, 16, 16, 128, 128)
COVERED = {
    "plain or causal, as many keys as queries": [PREFILL, replace(PREFILL, right=0)],
    "plain or causal, another number of keys": [
        replace(PREFILL, seq_len_q=512, batch=16),
        replace(PREFILL, seq_len_q=512, batch=16, right=0),
    ],
    "grouped heads": [replace(PREFILL, n_heads_kv=2)],
    "few queries over so many keys that they are cut into parts": [
        replace(PREFILL, batch=1, seq_len_q=1, seq_len_k=65536),
        replace(PREFILL, batch=1, seq_len_q=1, seq_len_k=65536, n_heads_kv=2),
    ],
    "windows": [replace(PREFILL, left=512), replace(PREFILL, left=512, right=0)],
    "soft cap": [replace(PREFILL, softcap=True)],
    "sinks": [replace(PREFILL, sinks=True)],
    "packed sequences": [replace(PREFILL, varlen=True)],
    "a cache of keys": [replace(PREFILL, varlen=True, cached=True)],
    "another head size of V": [replace(PREFILL, d_head=128, d_head_v=64)],
}
"""The rows of the table in docs/tools.md, each with problems of its kind."""


@pytest.mark.parametrize("device", ["H100", "A100"])
def test_tuning_covers_what_its_page_says(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buckets: list[Bucket] = []  # that selection looked into
    look = lookup_module._bucket_of
    monkeypatch.setattr(lookup_module, "_bucket_of", lambda *of: buckets.append(look(*of)) or look(*of))
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    table = page.split("| calls | measured | results count |\n| --- | --- | --- |\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert [row[0] for row in rows] == list(COVERED)
    for calls, _, count in rows:
        for problem in COVERED[calls]:
            buckets.clear()
            results = TuningResults(driver="1.0", shipped_only=True)
            select(problem, device_facts(device), results, explained=False)
            assert bool(buckets) == count.startswith("yes"), (calls, problem)
    assert {row[1] for row in rows if row[2] == "no"} == {"no"}


def test_numbers_of_keys_are_measured_in_buckets_of_their_own() -> None:
    problems = grid([DType.BF16], [512, 1024], [128], (False,), seq_lens_k=[512, 8192])
    assert [(p.seq_len, p.seq_len_k) for p in problems] == [
        (512, 512),
        (512, 8192),
        (1024, 512),
        (1024, 8192),
    ]
    buckets = [Bucket.of_problem(problem, 132) for problem in problems]
    assert [(b.queries, b.keys) for b in buckets] == [(p.seq_len, p.seq_len_k) for p in problems]
    with pytest.raises(ValueError, match="seq_len_k is 0; it must be at least 1"):
        grid([DType.BF16], [512], [128], seq_lens_k=[0])
    assert all(p.heads == p.heads_kv for p in problems)


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_the_shipped_table_and_the_defaults_are_one_truth(name: str) -> None:
    """In each cell that was measured: nothing that stands before the chosen kernel leads by more than noise,
    and the default runs where it was not measured beside the others."""
    facts, shipped = device_facts(name), TuningResults(shipped_only=True)
    table = tables.shipped_table(TunedDevice.of(facts))
    assert table is not None
    document = json.loads((tables.FOLDER / f"{facts.name.lower().replace(' ', '_')}.json").read_text())
    problems = {Bucket.from_json(e["bucket"]): Problem.from_json(e["problem"]) for e in document["buckets"]}
    measured_beside = 0
    for bucket, entry in table.buckets.items():
        problem = attention_problem(problems[bucket])
        default, chosen = select(problem, facts).kernel, select(problem, facts, shipped).kernel
        times = {kernel: milliseconds for kernel, milliseconds, _ in entry.kernels}
        if default.short_form() not in entry.took_part:
            assert chosen == default
            continue
        measured_beside += 1
        before = list(times)[: list(times).index(chosen.short_form())]
        assert all(times[kernel] * NOISE > times[chosen.short_form()] for kernel in before)
        assert chosen == default or times[chosen.short_form()] * NOISE <= times[default.short_form()]
    assert measured_beside > 30


def test_what_leads_at_another_length_is_not_taken() -> None:
    """On the H200 192 x 128 leads at 8192 queries; at 2048 it was measured to be 9 % behind the default."""
    h200, shipped = device_facts("H200"), TuningResults(shipped_only=True)
    size = Problem(DType.FP16, 2, 32, 2048, 64, causal=True)
    choice = select(attention_problem(size), h200, shipped)
    assert choice.kernel == select(attention_problem(size), h200).kernel
    assert "+9 % at 2048" in choice.reason


def test_a_tune_that_ends_begins_a_new_generation(bench: Bench) -> None:
    number = generation.number()
    bench.tune()
    assert generation.number() == number + 1
    bench.timer.interrupt_after = 0
    with pytest.raises(KeyboardInterrupt):
        bench.tune(fresh=True)
    assert generation.number() == number + 2


def test_a_tune_of_one_family_does_not_outvote_the_choice_of_another(bench: Bench) -> None:
    h100 = device_facts("H100")
    device = TunedDevice.of(h100, DEVICE.driver)
    bucket = Bucket.of_problem(SMALL, h100.sm_count)
    problem = attention_problem(SMALL)
    choice = select(problem, h100).kernel
    assert family_of(choice).name == "hopper"

    def results() -> TuningResults:
        return TuningResults(bench.database.path, DEVICE.driver)

    def record(kernel: ForwardKernel, milliseconds: float) -> None:
        measured = Measurement(kernel.short_form(), SMALL, stage=FINAL, milliseconds=milliseconds, rounds=11)
        bench.database.record(device, sources_digest(direction_of(kernel)), bucket, measured)

    record(ForwardKernel(CONFIGS[0]), 1.0)
    assert select(problem, h100, results()).kernel == choice
    record(choice, 2.0)  # it took part and is slower: now the other one counts
    assert select(problem, h100, results()).kernel.config == CONFIGS[0]
    assert select(replace(problem, softcap=True), h100, results()) == select(
        replace(problem, softcap=True), h100
    )  # nothing was measured with it
    record(choice, 0.5)
    tuned = select(problem, h100, results())
    assert tuned.kernel == choice
    assert "measured to be the quickest" in tuned.reason


def test_an_exported_table_is_used_where_the_database_has_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(tables.TableError, match="Run flash-attention tune first"):
        tables.export_table(A100, tmp_path / "table.json", bench.database, DEVICE.driver)
    choice = select(attention_problem(SMALL), A100).kernel
    bench.times = lambda kernel: 9.0 if kernel.config not in CONFIGS else milliseconds_of(kernel)
    bench.tune(chosen=chosen_kernels)
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "tables")
    written = tables.export_table(A100, None, bench.database, DEVICE.driver)
    assert written.name == "nvidia_a100_sxm4_80gb.json"
    table = tables.load_table(written)
    (entry,) = table.buckets.values()
    assert [name for name, _, _ in entry.kernels[:5]] == [c.short_form() for c in CONFIGS[:5]]
    chosen = [kernel.short_form() for kernel in chosen_kernels(SMALL, A100)]
    assert [name for name, _, _ in entry.kernels[5:]] == sorted(chosen)
    assert entry.took_part == {name for name, _, _ in entry.kernels}

    elsewhere = TuningResults(tmp_path / "none.sqlite3", driver="600.0")
    tuned = select(attention_problem(SMALL), A100, elsewhere)
    assert tuned.kernel == ForwardKernel(CONFIGS[0])
    assert "shipped table of NVIDIA A100-SXM4-80GB, driver 580.1" in tuned.reason
    with_lse = select(replace(attention_problem(SMALL), lse=True), A100, elsewhere)
    assert with_lse.kernel == ForwardKernel(CONFIGS[0])
    assert choice.short_form() in chosen
    assert not (tmp_path / "none.sqlite3").exists()

    written.write_text("{}")
    with pytest.raises(tables.TableError, match="can't be read"):
        tables.load_table(written)


@pytest.mark.parametrize("own", ["foreign card", "foreign driver", "one family", "no time", "far bucket"])
def test_a_database_without_an_answer_does_not_hide_the_shipped_table(bench: Bench, own: str) -> None:
    h100, problem = device_facts("H100"), Problem(DType.BF16, 4, 16, 4096, 128)
    shipped = TuningResults(shipped_only=True)
    wanted = select(attention_problem(problem), h100, shipped)
    assert "from the shipped table" in wanted.reason
    device = TunedDevice.of(A100 if own == "foreign card" else h100, DEVICE.driver)
    driver = "999.0" if own == "foreign driver" else DEVICE.driver
    where = replace(problem, seq_len=64, seq_len_k=64) if own == "far bucket" else problem
    kernel = ForwardKernel(replace(CONFIGS[0], d_head=128))
    milliseconds = None if own == "no time" else 0.001
    chosen = [] if own == "one family" else chosen_kernels(problem, h100)
    for each, time in [(kernel, milliseconds), *((c, milliseconds and 1.0) for c in chosen)]:
        measured = Measurement(each.short_form(), where, stage=FINAL, milliseconds=time, rounds=11)
        bucket = Bucket.of_problem(where, h100.sm_count)
        bench.database.record(device, sources_digest(direction_of(each)), bucket, measured)
    results = TuningResults(bench.database.path, driver)
    assert select(attention_problem(problem), h100, results) == wanted


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
