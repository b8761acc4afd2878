"""What a user meets first on the command line: version, help, plain text, pipes, interruptions, mistakes."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

import flash_attention
import flash_helpers
from flash_helpers.build.compile import CompiledKernel
from flash_helpers.cli import app
from flash_helpers.commands.build import compiled_only
from flash_helpers.commands.examples import EXAMPLES
from flash_helpers.console.output import TextConsole
from flash_helpers.console.plain_table import plain_lines
from flash_helpers.console.progress import shown_progress
from flash_helpers.kernel_configs import ForwardKernel, get_kernel_progression_configs
from flash_helpers.kernel_selection import parse_short_form

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
CLI = [sys.executable, "-m", "flash_attention"]
LADDER = get_kernel_progression_configs()
LONG_NAME = (
    "(BF16, 128, 256, 64, 8): async+eager+swizzled+load_1_1_1_tiles+opt_softmax+kv_stages_3+mbarrier+anchored"
)
BOXES = re.compile("[\u2500-\u257f]")


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return str(result.output)


# ---------------------------------------------------------------- version and help
def test_the_list_of_commands_cuts_no_sentence() -> None:
    assert "..." not in output_of("--help").partition("Commands:")[2]


def test_the_version_is_said_everywhere() -> None:
    assert flash_attention.__version__ == flash_helpers.__version__
    assert output_of("--version") == f"flash-attention-kernels {flash_helpers.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_plain_and_has_examples_that_can_be_run(name: str) -> None:
    shown = output_of(name, "-h")
    assert shown == output_of(name, "--help")
    assert not BOXES.search(shown)
    lines = [line.strip() for line in shown.partition("Examples:\n")[2].splitlines() if line.strip()]
    assert lines == list(EXAMPLES[name])
    for line in lines:
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("flash-attention", name)
        COMMANDS[name].make_context(name, arguments)  # raises for an unknown option or a wrong type


def test_modules_with_a_command_of_their_own_know_h_too() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flash_helpers.benchmark.features", "-h"], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "--contestants" in result.stdout


# ---------------------------------------------------------------- plain text
def a_table() -> Table:
    table = Table("problem", title="title")
    table.add_column("kernel", overflow="fold")
    table.add_column("TFLOP/s\nhot", justify="right")
    table.add_row("a", Text(LONG_NAME), "413.123456")
    table.add_row("b", Text("short\n  why [not]"), "7")
    return table


def test_plain_tables_have_a_line_a_row_and_lose_nothing() -> None:
    title, header, first, second = plain_lines(a_table())
    assert title == "title"
    assert header.split() == ["problem", "kernel", "TFLOP/s", "hot"]
    assert first == f"a        {LONG_NAME}   413.123456"
    assert re.fullmatch(r"b  +short why \[not\]  +7", second)


@pytest.mark.parametrize("width", [60, 80, 100, 300])
def test_no_terminal_is_too_narrow_for_a_name_or_a_number(width: int) -> None:
    file = io.StringIO()
    TextConsole(file=file, force_terminal=True, width=width, no_color=True).print(a_table())
    shown = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert LONG_NAME in shown
    assert "413.123456" in shown
    assert bool(BOXES.search(shown)) == (width == 300)


@pytest.mark.parametrize(
    "arguments",
    [("configs",), ("explain",), ("explain", LADDER[-1].short_form()), ("cache",), ("cache", "list")],
)
def test_what_is_no_terminal_gets_plain_text(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path))
    shown = output_of(*arguments)
    assert not BOXES.search(shown)
    assert "…" not in shown


def test_configs_have_a_line_each() -> None:
    lines = output_of("configs", "--device", "A100").splitlines()
    names = {config.short_form() for config in LADDER}
    assert names <= {line.partition("  ")[0] for line in lines}
    hopper = [line for line in lines if "2wg" in line]
    assert hopper
    assert all("wgmma" in line for line in hopper)  # the reason stands in the kernel's own line


def test_plain_is_an_option_for_terminals_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextConsole, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "300")
    assert BOXES.search(output_of("configs", "ladder"))
    assert not BOXES.search(output_of("configs", "ladder", "--plain"))
    assert BOXES.search(output_of("configs", "ladder"))  # it holds for one command


def test_a_long_name_does_not_push_out_bar_count_and_time() -> None:
    file = io.StringIO()
    with shown_progress(TextConsole(file=file, force_terminal=True, width=70)) as show:
        show("compiling", 3, 7, LONG_NAME)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue()).split("\r")[2]
    assert re.search(r"compiling \S+ 3/7 0:00:\d\d \(BF16", last)
    assert len(last.rstrip("\n")) <= 70


# ---------------------------------------------------------------- pipes and interruptions
@pytest.mark.parametrize("arguments", [("configs",), ("configs", "--json", "-"), ("--help",)])
def test_a_reader_that_leaves_is_no_error(arguments: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # nobody will ever read
    result = subprocess.run([*CLI, *arguments], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert result.returncode == 0, result.stderr
    assert "Broken pipe" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_command_keeps_its_own_status_when_its_reader_leaves() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run([*CLI, "configs", "nonsense"], stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert result.returncode == 2


def test_an_interrupted_bench_keeps_its_rows_and_says_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_helpers.benchmark import runner

    measure = runner.measure_problem

    def interrupted_at_64(problem: Any, *others: Any) -> Any:
        if problem.seq_len == 64:
            raise KeyboardInterrupt
        return measure(problem, *others)

    monkeypatch.setattr(runner, "measure_problem", interrupted_at_64)
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(
        app,
        ["bench", "32,64", "64", "--device", "cpu", "--peers", "math", "--rounds", "1", "--json", str(file)],
    )
    assert result.exit_code == 130
    assert "interrupted: these are the finished rows" in result.output
    assert "s32 d64" in result.output
    assert {row["problem"]["seq_len_q"] for row in json.loads(file.read_text())["rows"]} == {32}


# ---------------------------------------------------------------- mistakes
BEFORE_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch is imported before the arguments are checked")

sys.meta_path.insert(0, NoTorch())
from typer.testing import CliRunner
from flash_helpers.cli import app
for arguments in {cases!r}:
    result = CliRunner().invoke(app, arguments)
    print(result.exit_code, [line for line in result.output.splitlines() if line.startswith("error: ")])
"""
WRONG = [
    ["bench", "1k"], ["bench", "0"], ["bench", "64", "0"], ["bench", "--dtype", "fp8"],
    ["bench", "--causal", "perhaps"], ["bench", "--kernels", "nonsense"], ["bench", "--peers", "fa9"],
    ["bench", "--modes", "warm"], ["bench", "--rounds", "0"], ["bench", "--device", "gpu"],
    ["bench", "--kernels", "none", "--peers", "none"], ["bench", "--json", "/dev/null/x.json"],
    ["ladder", "--family", "volta"], ["ladder", "--dtype", "fp8"], ["ladder", "--seq-len", "0"],
    ["ladder", "--peers", "fa9"], ["ladder", "--rounds", "0"], ["ladder", "--device", "gpu"],
    ["ladder", "--causal", "x"], ["ladder", "--out", "/dev/null/x"],
    ["tune", "1k"], ["tune", "--budget", "-1"], ["tune", "--jobs", "0"], ["tune", "--causal", "x"],
    ["tune", "--dtype", "fp8"], ["tune", "--kernels", "nonsense"], ["tune", "--device", "gpu"],
    ["explain", "x"], ["explain", "--dtype", "fp8"], ["explain", "--device", "B300"],
    ["build", "nonsense"], ["build", "ladder", "--target", "75"], ["configs", "nonsense"],
    ["report", "pyproject.toml"], ["cache", "burn"],
]  # fmt: skip


def test_wrong_arguments_are_refused_before_torch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH.format(cases=WRONG)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = dict(zip(map(" ".join, WRONG), done.stdout.splitlines(), strict=True))
    assert {case: line for case, line in told.items() if not re.match(r"2 \[.error: ", line)} == {}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "(FP16, 128, 64, 64, 4): asinc+load_0_2_2_tiles",
            "the word 'asinc' is unknown; allowed: async, eager",
        ),
        (
            "(FP16, 128, 64, 64): async+load_0_2_2_tiles",
            "has 4 parts; the form is (dtype, d_head, B_r, B_c, n_w",
        ),
        ("(FP16, 128, x, 64, 4): async+load_0_2_2_tiles", "B_r is 'x'"),
        ("(FP17, 128, 64, 64, 4): async+load_0_2_2_tiles", "unknown dtype 'FP17'; valid: FP16"),
        ("(FP16, 128, 64, 64, 4): async", "the word load_Q_K_V_tiles is missing"),
        ("(FP16, 128, 64, 64, 4): async+async+load_0_2_2_tiles", "the word 'async' is said twice"),
        (
            "(FP16, 128, 64, 64, 4): lagged+anchored+load_0_2_2_tiles",
            "lagged and anchored contradict each other",
        ),
        ("(FP16, 128, 64, 64, 4): async load_0_2_2_tiles", "'async load_0_2_2_tiles' is no word"),
        (
            "(BF16, 128, 128, 128, 2wg): tma+kv2+q_2+lagged",
            "the word 'kv2' is unknown; allowed: tma, kv_N",
        ),
        (
            "(BF16, 128, 128, 128, 2wg): tma+kv_2+q_2+overlapp+lagged",
            "the word 'overlapp' is unknown; allowed:",
        ),
        ("(BF16, 128, 128, 128, 2wg): tma+kv_2+q_2+lagged+lagged", "the word 'lagged' is said twice"),
        ("(BF16, 128, 128, 128, 2wg): tma+kv_2+q_2", "exactly one of exact, skip_rescale, lagged, anchored"),
        ("(BF16, 128, 128, 128, 3wg): tma+kv_2+q_2+lagged", "3wg does not go with the other sizes"),
        (
            "(BF16, 128, 128, 2wg): tma+kv_2+q_2+lagged",
            "has 4 parts; the form is (dtype, d_head",
        ),
        ("(BF16, 128, 128, 128, 2wg): tma+kv_2+q_2+lagged+heads_8+heads_9", "heads_8 and heads_9 contradict"),
        ("nonsense", "it has not the form (dtype, d_head, B_r, B_c, n_warps): words joined by +"),
    ],
)
def test_a_short_form_that_cannot_be_read_names_the_wrong_word(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        parse_short_form(name)
    assert "Close to it are:" in str(caught.value)


# ---------------------------------------------------------------- build and bench
def compiled(number: int, cached: bool) -> CompiledKernel:
    return CompiledKernel(ForwardKernel(LADDER[number]), 1.0, 32, 0, 0, (), "", cached)


def test_only_what_is_compiled_counts_as_compiling() -> None:
    shown: list[Any] = []
    progress = compiled_only(lambda work, done, total, text="": shown.append((work, done, total)))
    progress(compiled(0, True), 1, 1)
    assert shown == []
    for done, cached in enumerate([False, True, False], start=1):
        progress(compiled(done, cached), done, 3)
    assert shown == [("compiling", 1, 3), ("compiling", 2, 2)]


def test_bench_times_this_library_at_every_head_size() -> None:
    for kernels, told in (("attention", False), ("ladder", True)):
        result = CliRunner().invoke(
            app,
            [
                "bench",
                "32",
                "64",
                "--device",
                "cpu",
                "--peers",
                "math",
                "--rounds",
                "1",
                "--kernels",
                kernels,
            ],
        )
        assert result.exit_code == 0, result.output
        row = next(line for line in result.output.splitlines() if "attention, which ran" in line)
        assert row.startswith("fp16 b128 h8 s32 d64")
        said = "'ladder' has no forward kernel for fp16 and head size 64: attention() is timed"
        assert (said in result.output) == told
