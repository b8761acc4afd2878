"""benchmarks/fa3_backward.py: the rows that it writes. Its kernels need a GPU and JAX."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fa3_backward import BENCHMARK, row

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.results import BENCHMARKS, Results


def test_a_row_is_read_as_the_librarys_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [row(4096, True, 2e-3, [1.0, 3.0, 2.0])]
    ResultFile(BENCHMARK, BENCHMARKS[BENCHMARK], rows, direction="backward").save(path)
    (read,) = Results.load(path).rows
    assert (read.problem.batch, read.problem.heads, read.problem.d_head, read.problem.causal) == (
        4,
        8,
        256,
        True,
    )
    assert read.timings["call"].median == 2.0
    assert read.timings["call"].rounds == 3
    assert read.tflops("call") == pytest.approx(read.problem.flop() / 2e-3 / 1e12)


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_what_is_wrong_has_no_time(wrong: float) -> None:
    made = row(512, False, wrong, [1.0])
    assert (made["status"], made["milliseconds"]) == ("wrong", {})
    assert "allowed 0.016" in made["reason"]
