"""When the two kernels of one decoding call get where: a timeline of what its time is made of.

    python benchmarks/trace_decode.py --json trace.json
    python benchmarks/trace_decode.py --keys 1024 16384 65536 --batch 1
    python benchmarks/trace_decode.py --build-only

Kernels are compiled with ``-DFLASH_TRACE`` (``common/trace.cuh``): the first thread of each block notes the
time at a few places. Those that the library runs by itself are not touched: another process times them, and
the file has both times, which say what the notes cost. A call is measured with cold caches, as in the table
of features, behind a kernel of one thread that notes the time, too. A line of the timeline has three times
in microseconds since the first block of all began: of the first block to get there, of the middle one, and
of the last. All are medians over repeated calls.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flash_attention.backends import cuda, cuda_kernels
from flash_attention.call import Call, Mask, Scores
from flash_attention.layouts import DENSE
from flash_helpers.benchmark.cases import Case, make_inputs
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.runner import named_device
from flash_helpers.build import build_kernels
from flash_helpers.kernel_configs import device_facts
from flash_helpers.select.select import Choice, select

TARGET = 90
TRACED = {"NVCC_APPEND_FLAGS": "-DFLASH_TRACE"}
KERNELS, BLOCKS = ("parts", "combine"), 4096  # of trace.cuh
EVENTS = ("begins", "may read", "loads issued", "first tile", "last tile", "computed", "stored")
STAMP = np.dtype([("nanoseconds", np.uint64), ("cycles", np.uint64)])
NOTES = np.dtype(
    [
        ("stamps", STAMP, (len(KERNELS), BLOCKS, len(EVENTS))),
        ("sm", np.uint32, (len(KERNELS), BLOCKS)),
        ("mark", STAMP),
    ],
    align=True,
)
L2_BYTES = 256 << 20  # of other data: several times the cache
SPIN_CYCLES = 2_000_000  # under which the host launches all of a call
WHAT = "when the kernels of one decoding call get where"
METHOD = (
    "each call follows 256 MB of other data through the L2 cache; stamps are the GPU's clock of nanoseconds, "
    "made finer by each SM's cycles; medians over calls"
)


@dataclass(frozen=True)
class Timeline:
    """What one call's notes say.

    Attributes:
        events: of "parts begins" and the like: microseconds of the first, the middle and the last block.
        step: of the clock, as seen; nanoseconds.
    """

    events: dict[str, tuple[float, float, float]]
    step: int


def timeline(notes: NDArray[Any], blocks: Mapping[str, int]) -> Timeline:
    """The timeline of one call.

    Args:
        notes: one element of ``NOTES``.
        blocks: of each kernel.
    """
    start = int(notes["mark"]["nanoseconds"])
    seen: list[tuple[int, int, int, int, int]] = []  # kernel, event, SM, nanoseconds, cycles
    for k, name in enumerate(KERNELS):
        for block in range(blocks[name]):
            for e in range(len(EVENTS)):
                ns, cycles = notes["stamps"][k, block, e].tolist()
                if ns > start:  # older ones are of other calls, 0 of none
                    seen.append((k, e, int(notes["sm"][k, block]), ns - start, cycles))
    table = np.array(seen, dtype=np.int64)
    times = finer_times(table[:, 2], table[:, 3], table[:, 4]) * 1e-3
    times -= times.min()
    events = {}
    for k, name in enumerate(KERNELS):
        for e, event in enumerate(EVENTS):
            of = times[(table[:, 0] == k) & (table[:, 1] == e)]
            if of.size:
                events[f"{name} {event}"] = (float(of.min()), float(np.median(of)), float(of.max()))
    steps = np.diff(np.unique(table[:, 3]))
    return Timeline(events, int(steps.min()) if steps.size else 0)


def finer_times(sm: NDArray[Any], ns: NDArray[Any], cycles: NDArray[Any]) -> NDArray[np.float64]:
    """Nanoseconds of stamps, by the cycles of their SM: the GPU's clock moves in steps.

    Of one SM nanoseconds are a line over cycles; of all SMs its slope is the same. A stamp is noted up to
    one step late by the clock, which all of them are alike.
    """
    centred = [np.zeros(len(ns)), np.zeros(len(ns))]
    means: dict[int, tuple[float, float]] = {}
    for number in np.unique(sm):
        of = sm == number
        means[int(number)] = (float(ns[of].mean()), float(cycles[of].astype(np.float64).mean()))
        for values, array, mean in zip(centred, (ns, cycles), means[int(number)], strict=True):
            values[of] = array[of] - mean
    spread = float((centred[1] ** 2).sum())
    slope = float((centred[0] * centred[1]).sum()) / spread if spread else 0.0
    return np.array([means[int(number)][0] for number in sm]) + slope * centred[1]


def middle(lines: Sequence[Timeline]) -> Timeline:
    """Medians of several calls' times."""
    events = {
        name: tuple(statistics.median(line.events[name][i] for line in lines) for i in range(3))
        for name in lines[0].events
    }
    return Timeline(
        {name: (a, b, c) for name, (a, b, c) in events.items()},
        min(line.step for line in lines),
    )


class Traced:
    """The library of one traced kernel."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        size = self.library.flash_trace_bytes()
        if size != NOTES.itemsize:
            raise RuntimeError(f"notes have {size} bytes, not {NOTES.itemsize}: trace.cuh has changed")

    def mark(self) -> None:
        """Notes the time behind all that was launched: earlier notes are of other calls."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if error := self.library.flash_trace_mark(stream):
            raise RuntimeError(f"CUDA error {error} at a mark")

    def read(self) -> NDArray[Any]:
        """What was noted last."""
        notes = np.zeros(1, NOTES)
        if error := self.library.flash_trace_read(notes.ctypes.data_as(ctypes.c_void_p)):
            raise RuntimeError(f"CUDA error {error} where notes are read")
        return notes[0]


def choice_of(case: Case, facts: Any) -> Choice:
    """What the library runs."""
    return select(case.problem(), facts, explained=False)


def bound(case: Case, facts: Any) -> Callable[[], torch.Tensor]:
    """The call, made before, so that its kernels are loaded."""
    x = make_inputs(case, torch.device("cuda:0"))
    asked = Call(x.q, x.k, x.v, torch.empty_like(x.q), None, Mask(), Scores(case.d_head**-0.5), DENSE)

    choice = choice_of(case, facts)

    def call() -> torch.Tensor:
        cuda.run(asked, choice)
        return asked.out

    for _ in range(3):
        call()
    return call


def cold(call: Callable[[], object], other: torch.Tensor, before: Callable[[], None] | None = None) -> None:
    """One call, with other data in the caches, launched while the GPU is busy."""
    other.sum()  # read, not written: lines to be written back would delay the call
    torch.cuda._sleep(SPIN_CYCLES)
    if before is not None:
        before()
    call()


def event_time(call: Callable[[], object], other: torch.Tensor, repeats: int) -> float:
    """Median microseconds between two events around the call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for _ in range(repeats):
        cold(call, other, begin.record)
        end.record()
        end.synchronize()
        taken.append(1e3 * begin.elapsed_time(end))
    return statistics.median(taken)


def traced_call(choice: Choice, call: Callable[[], object], other: torch.Tensor, repeats: int) -> Timeline:
    """The timeline of a call whose kernel is built with stamps."""
    traced = Traced(build_kernels([choice.kernel], [TARGET], 1)[0].path)
    problem = choice.problem
    assert problem is not None  # whose heads have become rows
    rows = problem.batch * problem.n_heads * problem.seq_len_q
    parts = problem.batch * problem.n_heads * choice.n_splits
    combined = rows if choice.n_splits > 1 else 0
    blocks = {"parts": min(parts, BLOCKS), "combine": min(combined, BLOCKS)}
    lines = []
    for _ in range(repeats):
        cold(call, other, traced.mark)
        torch.cuda.synchronize()
        lines.append(timeline(traced.read(), blocks))
    return middle(lines)


def shown(line: Timeline, case: Case) -> str:
    """The timeline as text."""
    rows = [f"{name:22} " + " ".join(f"{t:8.2f}" for t in times) for name, times in line.events.items()]
    begun, ended = line.events["parts loads issued"][0], line.events["parts last tile"][2]
    rate = case.cache_bytes() / (ended - begun) / 1e3
    rows.append(f"keys and values in {ended - begun:.2f} us, {rate:.0f} GB/s")
    return "\n".join(rows)


def row_of(case: Case, choice: Choice, us: float, variant: str) -> dict[str, Any]:
    """A row of the result file."""
    return {
        "implementation": choice.kernel.short_form(), "kind": "kernel", "feature": "decode",
        "variant": variant, "problem": case.to_json(), "n_splits": choice.n_splits,
        "milliseconds": {"cold": {"median": us * 1e-3}},
    }  # fmt: skip


def times_without_stamps() -> list[float]:
    """What this program, called in the same way, measures in a process that loads kernels as they are."""
    command = [sys.executable, *sys.argv, "--without-stamps"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [float(us) for us in json.loads(found.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 16384, 65536])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--without-stamps", action="store_true", help="print the times of unchanged kernels")
    parser.add_argument("--build-only", action="store_true", help="compile for an H200")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = [Case("decode", options.batch, 1, n, 32, 8) for n in options.keys]
    if options.build_only:
        facts = device_facts("H200")
        kernels = dict.fromkeys(choice_of(case, facts).kernel for case in wanted)
        for flags in ({}, TRACED):
            os.environ.update(flags)
            for kernel in kernels:
                build_kernels([kernel], [TARGET], 1)
        return
    try:
        device = named_device("cuda:0")
    except ValueError as missing:
        parser.error(str(missing))
    facts = cuda_kernels.device_facts_of(device)
    other = torch.zeros(L2_BYTES // 4, device=device)
    if options.without_stamps:
        print(json.dumps([event_time(bound(case, facts), other, options.repeats) for case in wanted]))
        return
    plain = times_without_stamps()
    os.environ.update(TRACED)
    file = ResultFile("trace_decode", WHAT, environment=environment(device), method=METHOD)
    lines = []
    for case, plain_time in zip(wanted, plain, strict=True):
        choice, call = choice_of(case, facts), bound(case, facts)
        line = traced_call(choice, call, other, options.repeats)
        stamped = event_time(call, other, options.repeats)
        print(f"== {case.label()}, {choice.n_splits} parts: {plain_time:.2f} us, with stamps {stamped:.2f}")
        print(shown(line, case), flush=True)
        file.rows += [
            row_of(case, choice, plain_time, "without stamps"), row_of(case, choice, stamped, "with stamps"),
        ]  # fmt: skip
        lines.append(
            {"seq_len_k": case.seq_k, "clock_step_ns": line.step}
            | {name: [round(t, 3) for t in times] for name, times in line.events.items()}
        )
    file.facts = {"microseconds": lines}
    if options.json:
        file.save(options.json)


if __name__ == "__main__":
    main()
