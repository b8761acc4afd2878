"""Hardware counters beside the prediction: one launch of a kernel under Nsight Compute (``ncu``)."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from flash_helpers.explain.explanation import Explanation

METRICS = {
    "gpu__time_duration.sum": "time",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "matrix",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "exp2",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed": "shared memory",
    "l1tex__data_bank_conflicts_pipe_lsu.sum": "bank conflicts",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue",
    "lts__t_bytes.avg.pct_of_peak_sustained_elapsed": "L2",
    "dram__bytes.sum": "DRAM bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "launch__registers_per_thread": "registers",
    "launch__occupancy_limit_registers": "blocks by registers",
    "launch__occupancy_limit_shared_mem": "blocks by shared memory",
}
"""What is measured, and the name of the bound that it belongs to, where there is one."""

PROGRAM = "from flash_helpers.explain.profiled_call import main; main()"
KERNELS = "regex:forward_kernel"
TIMEOUT_S = 600.0
SECONDS = {
    "nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6,
    "msecond": 1e-3, "ms": 1e-3, "second": 1.0, "s": 1.0,
}  # fmt: skip


class ProfilerError(RuntimeError):
    """The profiler is missing or refuses; the message says what to do."""


@dataclass(frozen=True)
class Counter:
    """One measured counter."""

    name: str
    value: float
    unit: str


Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def find_ncu() -> str:
    """The profiler's path.

    Raises:
        ProfilerError: it is not on PATH.
    """
    if ncu := shutil.which("ncu"):
        return ncu
    raise ProfilerError(
        "ncu was not found on PATH: --ncu runs the kernel under Nsight Compute, which comes with the "
        "CUDA toolkit; add its folder to PATH, or leave --ncu away"
    )


def measure(e: Explanation, run: Runner | None = None) -> dict[str, Counter]:
    """Counters of one launch of an explained kernel on this machine's GPU, by the names of ``METRICS``.

    Args:
        e: the explanation; its kernel is built by the call where it is not yet.
        run: runs a command, in place of a subprocess.

    Raises:
        ProfilerError: no ``ncu``, no permission, or the call failed.
    """
    done = (run or _run)(command(find_ncu(), e))
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        raise ProfilerError(
            "the driver lets this user read no counters (ERR_NVGPUCTRPERM): run as root, or load the driver "
            "with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if done.returncode:
        lines = [line for line in output.splitlines() if line.strip()][-5:]
        raise ProfilerError(f"ncu ended with {done.returncode}: " + " / ".join(lines))
    return parse_counters(done.stdout)


def command(ncu: str, e: Explanation) -> list[str]:
    """The profiler's command line. The clock stays as it is, so that times are those of ordinary calls."""
    problem = {**asdict(e.problem), "dtype": e.problem.dtype.name}
    return [
        ncu, "--csv", "--clock-control", "none", "--kernel-name", KERNELS, "--launch-count", "1",
        "--metrics", ",".join(METRICS),
        sys.executable, "-c", PROGRAM, e.kernel.short_form(), json.dumps(problem),
    ]  # fmt: skip


def parse_counters(text: str) -> dict[str, Counter]:
    """Reads what ``ncu --csv`` prints: lines of its own, then a table with a row a metric.

    Raises:
        ProfilerError: there is no table, or nothing was profiled.
    """
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        said = " / ".join(line for line in lines if line.startswith("==")) or "nothing"
        raise ProfilerError(f"ncu printed no table of counters; it said {said}")
    counters = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[begin:]))):
        name = METRICS.get(row.get("Metric Name") or "")
        value = (row.get("Metric Value") or "").replace(",", "")
        if name is None or not value:
            continue
        try:
            counters[name] = Counter(name, float(value), row.get("Metric Unit") or "")
        except ValueError:
            continue  # "n/a": a counter that this GPU does not have
    if not counters:
        raise ProfilerError("ncu measured none of the wanted counters; is the kernel launched at all?")
    return counters


def counter_lines(e: Explanation, counters: dict[str, Counter]) -> list[str]:
    """The counters, each beside what was predicted."""
    lines = [f"measured by ncu, {e.kernel.short_form()}:"]
    p = e.performance
    time = counters.get("time")
    milliseconds = None
    if time is not None:
        milliseconds = 1e3 * time.value * SECONDS.get(time.unit, 1e-9)
        expected = f", predicted {p.expected:.4f} ms" if p else ""
        lines.append(f"  time {milliseconds:.4f} ms{expected}")
    for name, counter in counters.items():
        if name == "time":
            continue
        text = f"  {name} {counter.value:,.6g} {counter.unit}".rstrip()
        if p is not None and counter.unit == "%" and milliseconds:
            bound = next((b for b in p.bounds.all if b.name == name), None)
            if bound is not None:
                text += f" busy, by its bound {bound.milliseconds / milliseconds:.0%} of this time"
        if name == "registers":
            known = e.compiled.registers if e.compiled else None
            if known is not None:
                text += f", compiled {known}"
            elif e.registers is not None:
                text += f", predicted {e.registers.total}"
        if name == "DRAM bytes" and e.work is not None:
            text += f", at least {e.work.min_bytes:,} bytes"
        lines.append(text)
    return lines


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(arguments), capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProfilerError(f"ncu took longer than {TIMEOUT_S:.0f} seconds and was stopped") from None
