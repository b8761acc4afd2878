"""Tuning a few kernels on the GPU that is there, into a database of its own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from flash_attention.backends.cuda import device_facts_of
from flash_helpers.kernel_configs import ForwardConfig, ForwardKernel
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem
from flash_helpers.results.tables import export_table, load_table
from flash_helpers.select.choice import attention_problem, chosen_kernels
from flash_helpers.select.select import select
from flash_helpers.tune import Bucket, TunedDevice, TuningDatabase, TuningResults, lookup
from flash_helpers.tune.space import prune, tuning_space
from flash_helpers.tune.tuner import tune

PROBLEM = Problem(DType.FP16, 2, 16, 1024, 64)
FITTING = [c for c in tuning_space() if (c.dtype, c.d_head) == (PROBLEM.dtype, PROBLEM.d_head)]


def candidates() -> list[ForwardConfig]:
    """A few of each family that runs here, of those that the model does not leave out."""
    kept, _ = prune(FITTING, PROBLEM, device_facts_of())
    families: dict[type, list[ForwardConfig]] = {}
    for kernel in kept:
        families.setdefault(type(kernel.config), []).append(kernel.config)
    return [config for configs in families.values() for config in configs[:3]]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> TuningDatabase:
    """Two buckets tuned."""
    database = TuningDatabase(tmp_path_factory.mktemp("tune") / "tuning.sqlite3")
    device = torch.device("cuda", torch.cuda.current_device())
    problems = [PROBLEM, Problem(DType.FP16, 2, 16, 1024, 64, causal=True)]
    begin = time.monotonic()
    tuned = tune(problems, device=device, configs=candidates(), database=database, budget=60)
    print(f"tuned in {time.monotonic() - begin:.1f} s")
    assert [t.state for t in tuned] == ["tuned", "tuned"], [(t.reason, t.results) for t in tuned]
    assert all(m.status == "ok" for t in tuned for m in t.results), tuned
    return database


def test_every_candidate_is_timed_and_the_best_comes_first(database: TuningDatabase) -> None:
    facts = device_facts_of()
    found = lookup(Bucket.of_problem(PROBLEM, facts.sm_count), TunedDevice.of(facts), database)
    assert found is not None
    wanted = {*map(ForwardKernel, candidates()), *chosen_kernels(PROBLEM, facts)}
    assert {k.kernel for k in found.kernels} == {kernel.short_form() for kernel in wanted}
    finalists = [k.milliseconds for k in found.kernels[:4]]
    assert finalists == sorted(finalists)
    assert 0.1 < found.kernels[0].tflops < 2000


def test_a_second_tune_measures_nothing(database: TuningDatabase) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    begin = time.monotonic()
    (tuned,) = tune([PROBLEM], device=device, configs=candidates(), database=database)
    assert tuned.state == "known"
    assert time.monotonic() - begin < 5


def test_selection_and_export_read_it(database: TuningDatabase, tmp_path: Path) -> None:
    facts = device_facts_of()
    best = select(attention_problem(PROBLEM), facts, TuningResults(database.path))
    assert "measured to be the quickest" in best.reason
    table = load_table(export_table(facts, tmp_path / "table.json", database))
    assert len(table.buckets) == 2
    entry = table.buckets[Bucket.of_problem(PROBLEM, facts.sm_count)]
    assert entry.kernels[0][0] == best.kernel.short_form()
