"""Numeric classes: what decides the bits of a row follows from a configuration, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_attention.errors import InfeasibleConfigError
from flash_attention.run.choices import explain_choice
from flash_helpers.explain.asked import Asked
from flash_helpers.explain.command import explain_problem_command
from flash_helpers.explain.explanation import explain
from flash_helpers.explain.render import summary_lines
from flash_helpers.kernel_configs import DType, ForwardKernel, device_facts, get_ladder
from flash_helpers.kernels.ampere.forward.choices import get_ampere_best_kernels
from flash_helpers.kernels.ampere.forward.invariant import KEY_TILES, invariant_config
from flash_helpers.kernels.families import family_of
from flash_helpers.kernels.hopper.forward.invariant import INVARIANT
from flash_helpers.kernels.hopper.forward.sets import choose_hopper_kernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.problem import Problem
from flash_helpers.select.errors import NoKernelError
from flash_helpers.select.part_plan import WORKSPACE_BYTES, PartPlan, part_plan
from flash_helpers.select.prediction import expected
from flash_helpers.select.select import select, with_slots

ROOT = Path(__file__).parents[2]
PROBLEM = AttentionProblem(DType.BF16, 2, 1000, 1000, 8, 2, 128, 128, right=0, invariant=True)
PROBLEMS = [
    PROBLEM,
    replace(PROBLEM, lse=True),
    replace(PROBLEM, right=None),
    replace(PROBLEM, left=100, right=0),
    replace(PROBLEM, seq_len_q=1, right=None, seq_len_k=100_000),
    replace(PROBLEM, seq_len_q=1, seq_len_k=100_000, left=500, right=None),
    replace(PROBLEM, batch=64, seq_len_q=1, right=None, seq_len_k=8192, varlen=True, cached=True, paged=True),
    replace(PROBLEM, varlen=True),
    replace(PROBLEM, varlen=True, cached=True, planned=True),
    replace(PROBLEM, seq_len_q=8, varlen=True, cached=True, planned=True, paged=True, lse=True),
    replace(PROBLEM, batch=16, seq_len_q=16384, seq_len_k=16384),
    replace(PROBLEM, seq_len_q=2048, seq_len_k=100_000),
    replace(PROBLEM, sinks=True),
    replace(PROBLEM, out_float32=True),
    replace(PROBLEM, n_heads=2),
]


@pytest.mark.parametrize("sizes", INVARIANT, ids=str)
def test_hopper_kernels_of_a_head_size_are_of_one_class(sizes: tuple[int, int]) -> None:
    configs = INVARIANT[sizes]
    classes = {config.numeric_class for config in (configs.few, configs.many, configs.long, configs.packed)}
    assert len(classes) == 1
    assert classes.pop().row_obstacle is None


def test_short_sequences_take_shorter_blocks_of_the_class() -> None:
    def rows(queries: int) -> int:
        problem = AttentionProblem(DType.BF16, 64, queries, queries, 32, 32, 64, 64, invariant=True)
        config = select(problem, device_facts("H200"), explained=False).kernel.config
        assert config.numeric_class == INVARIANT[64, 64].many.numeric_class
        return config.B_r

    found = {queries: rows(queries) for queries in (64, 65, 128, 129, 256, 257, 384, 512)}
    assert found == {64: 64, 65: 128, 128: 128, 129: 256, 256: 256, 257: 128, 384: 128, 512: 256}


@pytest.mark.parametrize("d_head", KEY_TILES)
def test_ampere_kernels_of_a_head_size_are_of_one_class_on_all_gpus(d_head: int) -> None:
    classes = {
        invariant_config(DType.FP16, d_head, rows, device_facts(device), tall_warps).numeric_class
        for rows in (1, 64, 65, 4096)
        for device in ("A100", "RTX3090", "RTX4090", "H200")
        for tall_warps in (False, True)
    }
    assert len(classes) == 1
    assert classes.pop().row_obstacle is None


@pytest.mark.parametrize(
    ("device", "family"), [("H200", "hopper"), ("A100", "ampere"), ("RTX4090", "ampere")]
)
@pytest.mark.parametrize("d_head", [64, 80, 128, 192, 256])
def test_one_class_serves_all_problems(device: str, family: str, d_head: int) -> None:
    facts, classes, cut = device_facts(device), set(), False
    for problem in PROBLEMS:
        problem = replace(problem, d_head=d_head, d_head_v=d_head)
        choice = with_slots(select(problem, facts, explained=False), facts)
        assert family_of(choice.kernel).name == family
        assert choice.numeric_class == choice.kernel.config.numeric_class
        assert choice.numeric_class is not None
        assert choice.kernel.infeasible_reason(facts) is None
        chunk_keys = choice.numeric_class.chunk_tiles * choice.numeric_class.key_tile
        chunks = -(-problem.seq_len_k // chunk_keys) if chunk_keys else 1
        assert choice.n_splits in (1, chunks)  # keys are cut at fixed places, or not at all
        cut |= choice.n_splits > 1
        classes.add(choice.numeric_class)
        seen = choice.problem or problem
        assert seen.seq_len_k == problem.seq_len_k  # tiles are counted from key 0
    assert len(classes) == 1
    assert cut


PLANNED = replace(PROBLEM, batch=8, seq_len_k=8192, varlen=True, cached=True, planned=True, paged=True)


@pytest.mark.parametrize(("device", "chunks"), [("H200", 4), ("A100", 7)])  # of 2048 keys, of 1280
def test_the_device_cuts_keys_at_fixed_places_alone(device: str, chunks: int) -> None:
    facts = device_facts(device)

    def plan(problem: AttentionProblem, n_splits: int | None = None) -> PartPlan:
        choice = with_slots(select(problem, facts, explained=False), facts)
        return part_plan(problem, choice.kernel, choice.slots, 100, n_splits)

    found = plan(PLANNED)
    assert found.slots > 0
    assert found.rows == 100 * PLANNED.n_heads * chunks
    assert plan(PLANNED, 1) == replace(plan(PLANNED, 1), slots=0, fixed=1, rows=0)
    assert plan(PLANNED, 7).fixed == 7  # any number lets keys be cut
    whole = plan(replace(PLANNED, out_float32=True))  # which has no room for more than one part
    assert (whole.slots, whole.fixed, whole.rows) == (0, 1, 100 * PLANNED.n_heads)
    longest = plan(replace(PLANNED, seq_len_k=1 << 20))
    assert 4 * longest.rows * (PLANNED.d_head_v + 2) <= WORKSPACE_BYTES


def test_the_default_of_a_problem_is_what_it_was() -> None:
    facts = device_facts("H200")
    choice = select(replace(PROBLEM, invariant=False), facts)
    assert choice.numeric_class is None
    assert "numeric class" not in str(choice)


def test_kernels_whose_rows_depend_on_each_other_say_so() -> None:
    lagged = choose_hopper_kernel(DType.BF16, 128, True, 4096)[0].config.numeric_class
    assert lagged.reference == "lagged"
    assert "softmax_reference LAGGED moves for the rows of a warp together" in str(lagged.row_obstacle)
    references = {kernel.config.numeric_class.reference for kernel in get_ampere_best_kernels()}
    assert "anchored" in references


def test_explain_names_the_class() -> None:
    q = torch.empty(1, 512, 8, 128, dtype=torch.bfloat16, device="meta")
    choice = explain_choice(q, q, q, causal=True, facts=device_facts("H200"), numerics="invariant")
    assert "numeric class: wgmma, bf16, 128 keys a tile from the last to the first" in str(choice)
    others = [r.reason for r in choice.rejected]
    assert any("moves for the rows of a warp together" in reason for reason in others)
    assert any("its numeric class is not that of numerics='invariant' here: " in r for r in others)
    assert "it computes in FP16" not in others[0]  # the nearest come first
    assert others[-1] == "its head size is 256; a smaller one, 128, holds the tensors' 128"
    on_cpu = explain_choice(*(torch.empty(1, 8, 1, 64, dtype=torch.half),) * 3, numerics="invariant")
    assert "numeric class: float32 products of 64 rows by PyTorch" in str(on_cpu)


def test_the_command_names_the_class(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(batch=2, heads=8, seq_len=1024, causal=True, numerics="invariant")
    (found,) = explain_problem_command("H200", "bf16", 128, asked=asked)
    told = capsys.readouterr().out.replace("\n", " ")
    assert "numeric class: wgmma, bf16, 128 keys a tile" in told
    assert {c.kernel.config.numeric_class for c in found.candidates} == {
        found.candidates[0].kernel.config.numeric_class
    }
    with pytest.raises(ValueError, match="numerics is 'exact'; allowed: 'invariant', 'fast'"):
        Asked(numerics="exact")


@pytest.mark.parametrize(
    ("device", "kernel", "words"),
    [
        (
            "H200",
            ForwardKernel(replace(INVARIANT[128, 128].many, dtype=DType.BF16)),
            "the one of numerics='invariant' there",
        ),
        (
            "H200",
            choose_hopper_kernel(DType.BF16, 128, True, 4096)[0],
            "not invariant: its softmax_reference",
        ),
        (
            "H200",
            ForwardKernel(invariant_config(DType.BF16, 128, 4096, device_facts("A100"))),
            "not invariant: its numeric class is not that of .* here: mma.sync, not wgmma; 32 keys",
        ),
        (
            "A100",
            ForwardKernel(invariant_config(DType.BF16, 128, 4096, device_facts("A100"))),
            "the one of numerics='invariant' there",
        ),
    ],
    ids=["served", "by a warp", "other family", "ampere"],
)
def test_the_explanation_of_a_kernel_names_its_class(device: str, kernel: ForwardKernel, words: str) -> None:
    problem = replace(PROBLEM, n_heads_kv=8, right=None, invariant=False)
    explanation = explain(kernel.config, problem, device_facts(device))
    lines = summary_lines(explanation)
    place = [name for name, _ in lines].index("numeric class")
    assert lines[place][1] == str(kernel.config.numeric_class)
    assert re.match(words, lines[place + 1][1])
    told = explanation.to_json()
    assert told["numeric_class"] == str(kernel.config.numeric_class)
    assert (told["invariant_obstacle"] is None) == words.startswith("the one")


def test_the_page_says_what_invariant_calls_cost_on_an_a100_by_the_model() -> None:
    facts = device_facts("A100")

    def times(problem: AttentionProblem) -> float:
        fast, slow = (
            expected(select(asked, facts).kernel, asked.with_rows_packed(), facts).seconds
            for asked in (replace(problem, invariant=False), replace(problem, invariant=True))
        )
        return slow / fast

    def decoding(d_head: int, batch: int, keys: int) -> AttentionProblem:
        return AttentionProblem(DType.BF16, batch, 1, keys, 32, 8, d_head, d_head, varlen=True, cached=True)

    def said(batch: int, keys: int) -> list[str]:
        return [f"{max(100 * (times(decoding(d, batch, keys)) - 1), 0):.0f}" for d in (128, 64)]

    page = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    rows = {
        "one sequence of 16,384 keys": (1, 16384),
        "8 sequences of 8192 keys": (8, 8192),
        "64 sequences of 2048 keys": (64, 2048),
    }
    for line, sizes in rows.items():
        cells = re.search(rf"\| {line} \| \S+ \| (\d+) \| \S+ \| (\d+) \|", page)
        assert cells is not None
        assert list(cells.groups()) == said(*sizes)
    assert (
        f"One sequence of 4096 keys takes {times(decoding(128, 1, 4096)):.1f} times as long by the model"
        in page
    )


def test_classes_say_what_differs() -> None:
    own = invariant_config(DType.BF16, 128, 4096, device_facts("A100")).numeric_class
    other = replace(own, reference="exact", head_parts=2, chunk_tiles=16)
    assert own.difference(own) == ""
    assert other.difference(own) == (
        f"exact reference, not {own.reference} reference; scores of 2 parts of the head, not scores of the "
        "whole head; chunks of 16 tiles, not chunks of 40 tiles"
    )
    assert "part" not in str(own)
    assert "scores of 2 parts of the head" in str(other)


def test_a_kernel_of_gradients_has_no_class() -> None:
    config = get_ladder("ampere_backward", DType.BF16, 128, False)[-1].config
    problem = Problem(DType.BF16, 2, 8, 1024, 128, direction="backward")
    explanation = explain(config, problem, device_facts("A100"))
    assert explanation.to_json()["numeric_class"] is None
    assert "numeric class" not in dict(summary_lines(explanation))


def test_a_configuration_of_another_class_is_refused() -> None:
    q = torch.empty(1, 512, 8, 128, dtype=torch.bfloat16, device="meta")
    facts = device_facts("H200")
    own = explain_choice(q, q, q, facts=facts, numerics="invariant").kernel.config
    assert explain_choice(q, q, q, facts=facts, numerics="invariant", config=own).kernel.config == own
    narrower = replace(own, B_c=64)
    with pytest.raises(InfeasibleConfigError, match=r"'invariant' here: 64 keys a tile, not 128 keys a tile"):
        explain_choice(q, q, q, facts=facts, numerics="invariant", config=narrower)


def test_tensors_that_the_family_cannot_reach_are_refused() -> None:
    problem = replace(PROBLEM, tma_obstacle="their rows are 3 bytes apart")
    with pytest.raises(NoKernelError, match="their rows are 3 bytes apart") as refused:
        select(problem, device_facts("H200"))
    reasons = str(refused.value).splitlines()[1:]  # and no other: of another class, type or size is no news
    assert [line.startswith("  its bulk copies") for line in reasons] == [True, False]
    assert reasons[1].startswith("Leave numerics away, and kernels of other classes may run")
