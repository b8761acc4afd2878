"""``flash-attention tune`` from end to end, in processes of its own: an H100 whose times are made up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flash_helpers.kernel_configs import device_facts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.problem import Problem
from flash_helpers.results import tables
from flash_helpers.select.choice import attention_problem, chosen_kernels
from flash_helpers.select.select import select
from flash_helpers.tune import Bucket, TuningDatabase, TuningResults

pytestmark = pytest.mark.perf

H100 = device_facts("H100")
ARGUMENTS = ("tune", "64,128", "64", "--dtype", "bf16", "--batch", "2", "--heads", "2", "--device", "cpu")
BUCKETS = 4  # two lengths, with and without a mask

PROGRAM = """
import functools, os, signal, sys, zlib
from flash_attention.backends import cuda
from flash_helpers import cli
from flash_helpers.benchmark.correctness import reference
from flash_helpers.benchmark.implementations import Prepared
from flash_helpers.kernel_configs import device_facts
from flash_helpers.results import device
from flash_helpers.tune import tuner

H100, limit, measured = device_facts("H100"), int(sys.argv.pop(1)), 0
outputs = {}

class Implementation:
    def __init__(self, kernel):
        self.kernel, self.name = kernel, kernel.short_form()
    def unavailable_reason(self, problem, device):
        return None
    def prepare(self, problem, q, k, v):
        if problem not in outputs:
            outputs[problem] = reference(q, k, v, problem.causal)
        o = outputs[problem]
        call = lambda: o
        call.milliseconds = 1 + zlib.crc32((self.name + problem.label()).encode()) / 2**32
        return Prepared(call)

class Timer:
    modes = ("kernel",)
    def estimate(self, timed):
        timed.milliseconds = timed.call.milliseconds
    def measure(self, mode):
        return self._measure
    def _measure(self, timed):
        global measured
        measured += 1
        if measured == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return timed.call.milliseconds

def compile_kernels(kernels, target, jobs, on_kernel, out_of_time):
    return set(kernels), {}

cuda.device_facts_of = lambda device=None: H100
device.driver_version = lambda: "580.1"
tuner.tune = functools.partial(  # the command imports it when it runs
    tuner.tune, facts=H100, timer=Timer(), implement=Implementation,
    compile_kernels=compile_kernels,
)
try:
    cli.main()
finally:
    print("measured", measured, file=sys.stderr)
"""


def run(folder: Path, *arguments: str, kill_at: int = 0) -> tuple[subprocess.CompletedProcess[str], int]:
    """Runs the command line; also gives the number of measurements that it made (0 when it was killed)."""
    environment = {**os.environ, "FLASH_ATTENTION_TUNING_DB": str(folder / "tuning.sqlite3")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(kill_at), *arguments],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    # Not always its last line: a process that ends may say more.
    measured = re.findall(r"^measured (\d+)$", done.stderr, re.MULTILINE)
    return done, int(measured[-1]) if measured else 0


def milliseconds(buckets: list[dict[str, Any]]) -> dict[str, dict[str, tuple[float | None, str]]]:
    """Time and stage of each kernel in each bucket of a ``--json`` file."""
    return {
        Bucket.from_json(b["bucket"]).label(): {
            r["kernel"]: (r["milliseconds"], r["stage"]) for r in b["results"]
        }
        for b in buckets
    }


def test_killed_half_way_it_resumes_and_its_table_is_chosen_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    done, all_of_it = run(whole, *ARGUMENTS, "--json", str(whole / "out.json"))
    assert done.returncode == 0, done.stderr
    assert all_of_it > 0, done.stderr
    assert f"screening {BUCKETS} of {BUCKETS}" in done.stderr  # no terminal: plain lines
    assert f"ranking {BUCKETS} of {BUCKETS}" in done.stderr

    dead, _ = run(killed, *ARGUMENTS, kill_at=all_of_it // 2)
    assert dead.returncode == -signal.SIGKILL
    known, none = run(killed, *ARGUMENTS, "--budget", "0", "--json", str(killed / "known.json"))
    assert (known.returncode, none) == (0, 0), known.stderr
    before = json.loads((killed / "known.json").read_text())["buckets"]
    assert {b["state"] for b in before} <= {"partly", "known"}
    assert all(any(r["milliseconds"] for r in b["results"]) for b in before)  # a winner everywhere

    table = killed / "tables"
    resumed, rest = run(
        killed, *ARGUMENTS, "--budget", "300", "--export", str(table), "--json", str(killed / "out.json")
    )
    assert resumed.returncode == 0, resumed.stderr
    assert 0 < rest < 0.6 * all_of_it
    after = json.loads((killed / "out.json").read_text())["buckets"]
    assert {b["state"] for b in after} <= {"known", "tuned"}
    wanted = milliseconds(json.loads((whole / "out.json").read_text())["buckets"])
    for label, found in milliseconds(after).items():
        assert {name: ms for name, (ms, _) in found.items()} == {
            name: ms for name, (ms, _) in wanted[label].items()
        }
        assert min(found, key=lambda name: found[name][0] or 9.0) == next(iter(found))
    again, nothing = run(killed, *ARGUMENTS)
    assert (again.returncode, nothing) == (0, 0)

    # A machine with this card, another driver and no results of its own chooses by the table.
    (written,) = table.iterdir()
    assert written.name == "nvidia_h100_80gb_hbm3.json"
    monkeypatch.setattr(tables, "FOLDER", table)
    results = TuningResults(tmp_path / "none.sqlite3", driver="600.0")
    for entry in after:
        problem = Problem.from_json(entry["problem"])
        times = {r["kernel"]: r["milliseconds"] for r in entry["results"]}
        for lse in (False, True):
            call = attention_problem(problem, lse=lse)
            tuned, untuned = select(call, H100, results), select(call, H100)
            assert "from the shipped table" in tuned.reason
            assert times[tuned.kernel.short_form()] <= times[untuned.kernel.short_form()]
            assert lse or tuned.kernel.short_form() == entry["results"][0]["kernel"]


def test_a_tune_of_one_family_measures_the_choice_of_the_other_too(tmp_path: Path) -> None:
    done, _ = run(tmp_path, *ARGUMENTS, "--kernels", "ampere", "--causal", "no")
    assert done.returncode == 0, done.stderr
    database = TuningDatabase(tmp_path / "tuning.sqlite3")
    problem = Problem(DType.BF16, 2, 2, 128, 64)
    found = TuningResults(database.path, driver="580.1").of(attention_problem(problem), H100)
    assert found is not None
    wgmma = {name for name in found.took_part if "wg): " in name}
    assert wgmma == {k.short_form() for k in chosen_kernels(problem, H100) if "wg): " in k.short_form()}
    assert ForwardKernel(select(attention_problem(problem), H100).kernel.config, ForwardTraits()) in (
        chosen_kernels(problem, H100)
    )


def test_nothing_to_export_is_said(tmp_path: Path) -> None:
    done, _ = run(tmp_path, *ARGUMENTS, "--budget", "0", "--export", str(tmp_path / "table.json"))
    assert done.returncode == 2
    assert "has no results of NVIDIA H100 80GB HBM3" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "table.json").exists()
