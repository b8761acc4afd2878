"""benchmarks/row_candidates.py: its plan, and what it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from row_candidates import PLAN, named_case, read_plan

from flash_helpers.benchmark.grid_cases import grid_cases

KERNEL = "(BF16, 128, 128, 80, 2wg): tma+kv_2+q_4+overlap+ping_pong+lagged+next_with_pv+direct+sections"
CAUSAL = "head size b4 s4096 h16 causal"
PLAIN = "head size b4 s4096 h16"


def plan(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_candidate_of_the_plan_can_compute_its_rows():
    rows = read_plan(PLAN)
    assert sum(len(row.kernels()) for row in rows) > 100
    assert {row.factor for row in rows} == {1, 8}


def test_candidates_of_short_sequences_can_compute_their_rows():
    rows = read_plan(PLAN.with_name("short_sequences.txt"))
    assert sum(len(row.kernels()) for row in rows) > 50
    one_block = next(row for row in rows if row.case.causal and row.case.seq_q == 128)
    assert {config.dynamic_schedule for config in one_block.configs if config.B_r == 128} == {False, True}
    two_blocks = next(row for row in rows if row.case.causal and row.case.seq_q == 256)
    assert all(getattr(config, "dynamic_schedule", True) for config in two_blocks.configs)


def test_rows_one_behind_the_other_share_candidates(tmp_path):
    rows = read_plan(plan(tmp_path, f"row {PLAIN}\nrow {CAUSAL}  # both\n{KERNEL}\n{KERNEL}\nrow {PLAIN}\n"))
    assert [len(row.configs) for row in rows] == [1, 1, 0]
    assert [row.configs[0].dynamic_schedule for row in rows[:2]] == [False, True]


def test_larger_scores_are_a_feature_of_their_own(tmp_path):
    (row,) = read_plan(plan(tmp_path, f"row {PLAIN}, scores x 8\n"))
    assert (row.factor, row.case.feature) == (8, "head size, scores x 8")


def test_names_of_rows_are_names_of_one():
    names = [named_case(case) for case in grid_cases()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KERNEL, "comes before the first row"),
        ("row head size b9", "no row 'head size b9' in the grid; of this feature there are: head size b4"),
        (f"row {PLAIN}\n(BF16, 128)", "BF16, 128"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_plan(plan(tmp_path, text))


def test_a_candidate_for_other_heads_is_refused(tmp_path):
    (row,) = read_plan(plan(tmp_path, f"row head size b4 s4096 h8 d256\n{KERNEL}\n"))
    with pytest.raises(ValueError, match="its head size is 128, the tensors' is 256"):
        row.kernels()
