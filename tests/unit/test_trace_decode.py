"""The timeline of a decoding call, from notes whose times are known."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TRACE = runpy.run_path(str(ROOT / "benchmarks" / "trace_decode.py"))
START = 1_000_000_007  # ns


def noted(step: int) -> np.ndarray:
    """Notes of two blocks of the parts on each of four SMs, and of two that combine; a clock of so many ns.

    Block i of the parts begins after 2 + i / 10 us and gets on every 3 us; the others begin at 25 us and take
    0.5 us from event to event.
    """
    notes = np.zeros(1, TRACE["NOTES"])[0]
    notes["stamps"]["nanoseconds"][:, 8:] = 5  # of an earlier call
    for kernel, (n, start, gap) in enumerate(((8, 2000.0, 3000.0), (2, 25000.0, 500.0))):
        for block in range(n):
            sm = block % 4
            notes["sm"][kernel, block] = sm
            for event in range(7):
                time = START + start + 100 * block + gap * event
                stamp = notes["stamps"][kernel, block, event]
                stamp["nanoseconds"] = int(time // step * step)
                stamp["cycles"] = int(1.5 * time) + 10**12 * sm
    notes["mark"]["nanoseconds"] = START // step * step
    return notes


@pytest.mark.parametrize(("step", "within"), [(1, 0.002), (32, 0.033), (1000, 1.0)])
def test_times_of_blocks_are_found(step: int, within: float) -> None:
    line = TRACE["timeline"](noted(step), {"parts": 8, "combine": 2})
    assert line.events["parts begins"] == pytest.approx((0.0, 0.35, 0.7), abs=within)
    assert line.events["parts stored"] == pytest.approx((18.0, 18.35, 18.7), abs=within)
    assert line.events["combine begins"] == pytest.approx((23.0, 23.05, 23.1), abs=within)
    assert line.events["combine stored"] == pytest.approx((26.0, 26.05, 26.1), abs=within)


def test_a_coarse_clock_is_made_finer_by_cycles() -> None:
    """What stands between two stamps of one SM, by a clock of 1 us."""
    line = TRACE["timeline"](noted(1000), {"parts": 8, "combine": 2})
    assert line.step == 1000
    apart = line.events["parts stored"][0] - line.events["parts begins"][0]
    assert apart == pytest.approx(18.0, abs=0.2)


def test_events_that_are_missing_are_left_out() -> None:
    notes = noted(1)
    notes["stamps"]["nanoseconds"][0, :, 1] = 0
    events = TRACE["timeline"](notes, {"parts": 8, "combine": 2}).events
    assert "parts may read" not in events
    assert "combine may read" in events


def test_notes_are_those_of_the_header() -> None:
    header = (ROOT / "src" / "include" / "common" / "trace.cuh").read_text()
    sizes = re.search(r"kTracedKernels = (\d+), kTracedBlocks = (\d+), kTraceEvents = (\d+)", header)
    assert sizes is not None
    assert tuple(map(int, sizes.groups())) == TRACE["NOTES"]["stamps"].shape
    events = re.search(r"enum class TraceEvent \{(.*?)\};", header, re.S)
    assert events is not None
    words = re.findall(r"^\s+([A-Z_]+),", events[1], re.M)
    assert [word.lower().replace("_", " ") for word in words] == [
        {"begins": "begin"}.get(event, event) for event in TRACE["EVENTS"]
    ]
    assert TRACE["NOTES"].itemsize == 2 * 4096 * 7 * 16 + 2 * 4096 * 4 + 16
