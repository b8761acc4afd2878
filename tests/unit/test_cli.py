"""The command line: what each command prints and writes, and that mistakes are told without a traceback."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flash_helpers.build import CompiledKernel, KernelCache, build_library
from flash_helpers.build.index import remember
from flash_helpers.build.nvcc import Nvcc
from flash_helpers.build.store import STORE
from flash_helpers.cli import app
from flash_helpers.commands.cache import cached_objects, clear_cache
from flash_helpers.commands.configs import list_configs
from flash_helpers.kernel_configs import (
    DType,
    ForwardKernel,
    get_kernel_progression_configs,
    get_ladder,
)
from flash_helpers.kernel_selection import select_kernels
from flash_helpers.kernels.families import DIRECTIONS
from flash_helpers.kernels.hopper.forward.ladder import get_hopper_progression_configs
from flash_helpers.results import tables
from flash_helpers.tune import compile as tune_compile

LADDER = get_kernel_progression_configs()
SHORT_FORM = LADDER[-1].short_form()


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))
    # Where an earlier process could not write its cache, it left kernels in the temporary directory.
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("FLASH_ATTENTION_TUNING_DB", raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*arguments: str) -> Any:
    """Runs a command; whatever else it does, it shows no traceback."""
    result = CliRunner().invoke(app, list(arguments))
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def json_of(*arguments: str) -> object:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fake_build(cache: KernelCache, folder: Path, kernels: list[ForwardKernel], target: int = 80) -> None:
    """Kernels in the cache, compiled by a shell script."""
    nvcc = folder / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do previous=$last; last=$word; [ "$previous" = -o ] && output=$word; done\n'
        'echo whole > "$output"\n'
    )
    nvcc.chmod(0o755)
    result = build_library(kernels, target, cache=cache, nvcc=Nvcc(nvcc, (13, 0), "13.0.88"))
    remember(cache, result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("configs", "nonsense"), "no set of kernels is named 'nonsense'; valid: all"),
        (("configs", "(FP16, 128, 64, 48, 4): async"), "Close to it are"),
        (("configs", "--dtype", "fp8"), "unknown dtype 'fp8'"),
        (("configs", "--causal", "maybe"), "valid: no, yes, both"),
        (("configs", f"{SHORT_FORM} | causall"), "unknown trait 'causall'; known: causal"),
        (("configs", "--device", "B300"), "known: A100"),
        (("build", "ladder", "--target", "75"), "ampere: sm_80 and newer; hopper: sm_90a only"),
        (("build", "hopper", "--target", "80"), "none of the"),
        (("build", "ladder", "--target", "ninety"), "no list of GPU generations"),
        (("cache", "burn"), "valid: size, list, clear"),
        (("ladder", "--family", "volta"), "valid: ampere, hopper, ampere_backward, hopper_backward, all"),
        (("tune", "1k"), "seq_lens is '1k'; it must be whole numbers joined by commas"),
        (("tune", "--jobs", "0"), "jobs is 0; allowed: a number of compilations from 1 on"),
        (("bench", "64", ""), "d_heads is ''; it must be whole numbers joined by commas"),
        (("ladder", "--seq-len", "64,"), "--seq-len is '64,'; it must be whole numbers"),
        (("bench", "64", "64", "--kernels", "none", "--peers", "none"), "there is nothing to measure"),
        (("bench", "64", "64", "--kernels", ""), "no kernels are named; valid: short forms joined by ;"),
        (("bench", "64", "64", "--device", "cpu", "--modes", "graph,cold"), "known: hot, paused, call"),
        (("configs", ""), "no kernels are named"),
        (("configs", "--d-head", "-1"), "d_head is -1; it must be a head size, or 0 for any"),
        (("build", "", "--target", "80"), "no kernels are named"),
        (("build", "none", "--target", "80"), "which names none to build"),
        (("build", "nonsense"), "no set of kernels is named 'nonsense'; valid: all, ampere"),
        (("configs", "ladderwibble"), "no set of kernels is named 'ladderwibble'; valid: all, ampere"),
        (("explain", "--d-head", "7"), "d_head is 7; attention takes the multiples of 8 from 8 to 256"),
        (("explain", SHORT_FORM, "--d-head", "64"), "--d-head is 64, and the kernel has its own"),
        (("explain", SHORT_FORM, "--dtype", "bf16"), "--dtype is bf16, and the kernel has its own"),
        (("explain", "--direction", "backward", "--softcap", "3"), "or leave the kernel, '3', away"),
        (("explain", f"{SHORT_FORM} | window"), "give it as an option (--window LEFT,RIGHT)"),
        (
            ("explain", f"{SHORT_FORM} | padded_head"),
            "leave padded_head away, since a kernel is explained for",
        ),
        (("explain", SHORT_FORM, "--direction", "backward"), "--direction is backward, and the kernel has"),
        (("explain", SHORT_FORM, "--deterministic"), "which always is deterministic: leave --deterministic"),
        (("explain", SHORT_FORM, "--numerics", "invariant"), "--numerics asks which kernel a problem gets"),
        (("explain", "--deterministic"), "always is deterministic: add --direction backward"),
        (("explain", "--page-size", "8"), "--page-size is about a cache in pages: add --paged"),
        (("explain", "--paged", "--page-size", "-8"), "page_size is -8; it must be at least 1, or 0"),
        (("explain", "--planned", "--direction", "backward"), "leave --planned or --direction backward away"),
        (("explain", "--dtype", ""), "unknown dtype ''; valid: FP16"),
        (("explain", "--compile"), "--compile is about a kernel: name it first"),
        (("tune", "--budget", "-1"), "must be a number of seconds"),
        (("tune", "--causal", "perhaps"), "valid: no, yes, both"),
        (("explain", "x"), "Close to it are"),
        (("bench", "0", "64"), "seq_len is 0; it must be at least 1"),
        (("bench", "64", "64", "--batch", "-1"), "batch is -1; it must be at least 1, or 0: as many as"),
        (("bench", "64", "64", "--heads", "-2"), "heads is -2; it must be at least 1, or 0: as many as"),
        (("bench", "64", "64,-8"), "d_head is -8; attention takes the multiples of 8 from 8 to 256"),
        (("bench", "64", "300"), "d_head is 300; attention takes the multiples of 8 from 8 to 256"),
        (("bench", "64", "64", "--device", "gpu"), "device is 'gpu'; valid: cpu, cuda, or"),
        (("ladder", "--device", "gpu"), "device is 'gpu'; valid: cpu, cuda, or"),
        (("tune", "--device", "gpu"), "device is 'gpu'; valid: cpu, cuda, or"),
        (("build", SHORT_FORM, "--target", "80", "--jobs", "0"), "jobs is 0; allowed"),
        (("bench", "9000000", "64", "--kernels", "none"), "wants"),
        (("report", "pyproject.toml"), "can't be read as a result file"),
    ],
)
def test_mistakes_end_with_a_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "512"), "no CUDA device can be used here"),
        (("tune", "--budget", "0", "--export", "x.json"), "no CUDA device can be used here"),
        (("bench", "64", "64", "--device", "cuda"), "no CUDA device can be used here"),
        (("ladder", "--device", "cuda:3"), "no CUDA device can be used here"),
        (("bench", "64", "64", "--kernels", "tuned"), "there is none here"),
        (("build", "ladder"), "--target 80, 86, 89 or 90"),
    ],
)
def test_what_needs_a_gpu_says_so(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


@pytest.mark.usefixtures("no_gpu")
def test_what_is_named_twice_is_measured_once(tmp_path: Path) -> None:
    document = json_of(
        "bench", "32,32", "128", "--dtype", "fp16,fp16", "--kernels", f"{SHORT_FORM}; {SHORT_FORM}",
        "--peers", "sdpa-cpu,sdpa-cpu", "--modes", "hot,hot", "--rounds", "1",
    )  # fmt: skip
    assert isinstance(document, dict)
    assert [row["implementation"] for row in document["rows"]] == ["sdpa-cpu", SHORT_FORM]
    explained = json_of("explain", "--device", "A100,A100", "--seq-len", "512")
    assert isinstance(explained, list)
    assert len(explained) == 1


def main_of(module: str) -> Callable[..., None]:
    """The ``main`` of a module of ``flash_helpers``, or of a file."""
    if not module.endswith(".py"):
        return importlib.import_module(f"flash_helpers.{module}").main
    return runpy.run_path(str(Path(__file__).parents[2] / module))["main"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("benchmark.features", ["--contestants", "fa9"], "unknown contestant 'fa9'; known: ours"),
        ("benchmark.features", ["--out", "taken"], "--out is taken, but taken is no folder"),
        (
            "benchmark.call_time",
            ["--json", "taken/times.json"],
            "is taken/times.json, which can't be written",
        ),
        ("benchmark.milestone", ["--out", "taken/below"], "but taken is no folder"),
        ("benchmark.milestone", ["--peers", "fa9"], "unknown peer 'fa9'; known: fa2"),
        ("benchmark.milestone", ["--rounds", "0"], "rounds is 0; it must be at least 1"),
        ("benchmark.milestone", ["--batch", "-1"], "batch is -1; it must be at least 1"),
        ("build.gates", ["--target", "70"], "target is 70; kernels are chosen for 80, 86, 89, 90"),
        ("test.random_cases", ["--device", "tpu"], "device is 'tpu'; here are: cpu"),
        ("test.random_cases", ["--device", "cuda"], "no CUDA device can be used here"),
        ("test.random_cases", ["--cases", "0"], "cases is 0"),
        ("test.random_cases", ["--share", "2/2"], "share is '2/2'; it must be i/n"),
        (
            "test.random_cases",
            ["--json", "taken/result.json"],
            "is taken/result.json, which can't be written",
        ),
        ("benchmarks/ampere_choices.py", ["--json", "new.json"], "no CUDA device can be used here"),
        ("benchmarks/decode_variants.py", [], "no CUDA device can be used here"),
        ("benchmarks/hopper_variants.py", [], "no CUDA device can be used here"),
        ("benchmarks/row_candidates.py", [], "no CUDA device can be used here"),
    ],
)
def test_commands_of_their_own_refuse_mistakes_before_they_begin(
    module: str, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    command = typer.Typer()
    command.command()(main_of(module))
    result = CliRunner().invoke(command, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


# ---------------------------------------------------------------- configs
def test_kernels_with_traits_are_named_in_three_ways() -> None:
    assert [k.short_form() for k in select_kernels(SHORT_FORM)] == [SHORT_FORM]
    assert [k.short_form() for k in select_kernels(f"{SHORT_FORM} | causal")] == [f"{SHORT_FORM} | causal"]
    both = select_kernels("hopper_ladder", "both")
    assert len(both) == 2 * len(get_hopper_progression_configs())
    assert sum(k.traits.causal for k in both) == len(get_hopper_progression_configs())


def test_configs_filters(tmp_path: Path) -> None:
    everything = list_configs()
    assert {e.family for e in everything} == {direction.label for direction in DIRECTIONS}
    some = list_configs(dtype="bf16", d_head=64, words="eager,buffer")
    assert some
    assert all("BF16, 64" in e.kernel and "eager" in e.kernel and "buffer" in e.kernel for e in some)
    cache = KernelCache(tmp_path / "cache")
    built = [ForwardKernel(LADDER[0]), ForwardKernel(LADDER[1])]
    fake_build(cache, tmp_path, built)
    names = [kernel.short_form() for kernel in built]
    assert [e.kernel for e in list_configs("ladder", built=True)] == names
    assert [e.built for e in list_configs("ladder", built=True)] == [(80,), (80,)]
    assert not {e.kernel for e in list_configs("ladder", built=False)} & set(names)
    shown = run("configs", "ladder", "--d-head", "64").stdout
    assert "no kernel of 'ladder' passes all filters. Its head sizes are 128" in shown
    shown = run("configs", "ladder", "--words", "eagr").stdout
    assert "words of its short forms are async, buffer, eager, load_0_0_0_tiles" in shown
    assert json_of("configs", "ladder", "--d-head", "64") == []


def test_configs_say_what_a_device_can_run() -> None:
    entries = json_of("configs", "--device", "RTX3090")
    assert isinstance(entries, list)
    hopper = [e for e in entries if e["family"] == "hopper"]
    assert all("wgmma" in e["infeasible"] and e["blocks_per_sm"] == 0 for e in hopper)
    (tuned,) = [e for e in entries if e["kernel"] == SHORT_FORM]
    # 48 KiB a block and 1 KiB reserved: two in 100 KiB.
    assert (tuned["smem_bytes"], tuned["blocks_per_sm"], tuned["infeasible"]) == (49152, 2, None)
    shown = run("configs", "ladder", "--device", "A100").stdout
    assert "7 kernels, 0 built, 7 run on A100" in shown
    header = shown.partition("(FP16")[0]
    assert "registers, predicted" in " ".join(header.split())
    assert "blocks per SM, by these" in " ".join(header.split())


# ---------------------------------------------------------------- explain and bench
def test_explain_reads_the_traits_of_a_short_form() -> None:
    (explained,) = json_of("explain", f"{SHORT_FORM} | causal")  # type: ignore[misc]
    assert explained["problem"]["right"] == 0
    assert explained["kernel"] == f"{SHORT_FORM} | causal"
    assert json_of("explain", SHORT_FORM, "--causal") == [explained]
    assert "unknown trait 'sideways'" in run("explain", f"{SHORT_FORM} | sideways").output


def test_explain_of_a_length_beyond_every_memory_ends_at_once() -> None:
    (explained,) = json_of("explain", SHORT_FORM, "--seq-len", str(10**11), "--causal")  # type: ignore[misc]
    assert explained["problem"]["seq_len_q"] == 10**11
    assert "one launch holds" in explained["infeasible"]


@pytest.mark.usefixtures("no_gpu")
def test_bench_writes_its_file_to_standard_output_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("bench", "32,64", "64", "--kernels", "none", "--rounds", "1")
    document = json_of(*arguments)
    assert isinstance(document, dict)
    assert {row["problem"]["seq_len_q"] for row in document["rows"]} == {32, 64}
    assert list(tmp_path.glob("-*")) == []
    assert run(*arguments, "--json", "file.json").exit_code == 0
    assert json.loads((tmp_path / "file.json").read_text())["schema"] == document["schema"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "32", "64", "--json"), ("explain", "--json"), ("explain", SHORT_FORM, "--json"),
        ("tune", "512", "--json"), ("tune", "512", "--export"), ("ladder", "--json"), ("ladder", "--out"),
        ("configs", "--json"), ("build", "--json"), ("doctor", "--json"), ("cache", "clear", "--json"),
        ("report", "result.json", "--json"), ("report", "result.json", "--out"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_before_the_work(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    option = arguments[-1]
    result = run(*arguments, "taken/below/file.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{option} is taken/below" in result.stderr
    assert "taken is no folder; name another place" in result.stderr.replace("\n", " ")
    if option == "--json":
        (tmp_path / "folder").mkdir()
        result = run(*arguments, "folder")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--json is folder, a folder; name a file, such as folder/result.json" in result.stderr
        result = run(*arguments, "x" * 300 + ".json")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "which can't be written: File name too long; name another file" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "temporary", "folder", "taken"}


@pytest.mark.usefixtures("no_gpu")
def test_only_kernels_that_run_count_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the set has this head size; an output for each would pass the memory."""
    import flash_helpers.problem as problem

    monkeypatch.setattr(problem, "free_bytes", lambda device: 2 << 30)
    result = run("bench", "64", "104", "--kernels", "all", "--rounds", "1", "--peers", "math")
    assert result.exit_code == 0, result.output


# ---------------------------------------------------------------- build and cache
def test_build_compiles_links_and_says_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_build(
        KernelCache(tmp_path / "elsewhere"), tmp_path, [ForwardKernel(LADDER[0])]
    )  # makes tmp_path/nvcc
    nvcc = Nvcc(tmp_path / "nvcc", (13, 0), "13.0.88")
    monkeypatch.setattr("flash_helpers.build.compile.find_nvcc", lambda: nvcc)
    built = json_of("build", "ladder", "--target", "80,90", "--jobs", "1")
    assert isinstance(built, list)
    assert [(b["target"], len(b["kernels"]), b["bytes"]) for b in built] == [(80, 7, 6), (90, 7, 6)]
    again = json_of("build", "ladder", "--target", "80")
    assert isinstance(again, list)
    assert all(kernel["cached"] for kernel in again[0]["kernels"])
    # Of a mixed set, each target gets the families that it runs.
    mixed = json_of(
        "build", f"{SHORT_FORM}; {get_hopper_progression_configs()[0].short_form()}", "--target", "80,90"
    )
    assert isinstance(mixed, list)
    assert [(b["target"], len(b["kernels"])) for b in mixed] == [(80, 1), (90, 1), (90, 1)]


def test_cache_lists_measures_and_clears_only_what_is_its_own(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    fake_build(cache, tmp_path, [ForwardKernel(LADDER[0])])
    (tmp_path / "cache" / "tuning-1.sqlite3").write_text("results")
    parts = json_of("cache")
    assert isinstance(parts, dict)
    sizes = {part["name"]: part for part in parts["parts"]}
    assert sizes["objects"]["files"] == 2  # the object and its facts
    assert sizes["libraries"]["bytes"] > 0
    listed = json_of("cache", "list")
    assert isinstance(listed, dict)
    assert [(k["kernel"], k["bytes"], k["targets"]) for k in listed["kernels"]] == [
        (LADDER[0].short_form(), 6, [80])
    ]
    cleared = json_of("cache", "clear")
    assert isinstance(cleared, dict)
    assert cleared["freed"] > 12
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tuning-1.sqlite3"]
    assert (cached_objects(cache), clear_cache(cache).freed) == ([], 0)


def test_a_cache_that_cannot_be_cleared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "file"))
    result = run("cache", "clear")
    assert result.exit_code == 2
    assert f"{tmp_path / 'file' / STORE / 'objects'} can't be removed: Not a directory" in result.stderr


# ---------------------------------------------------------------- tune
def test_compiling_goes_on_past_a_refused_kernel_and_stops_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from flash_helpers.build import KernelCompileError

    good, bad, late = (ForwardKernel(config) for config in LADDER[:3])
    built: list[list[ForwardKernel]] = []

    def fake(kernels, targets, jobs, progress):  # type: ignore[no-untyped-def]
        for number, kernel in enumerate(kernels, start=1):
            if kernel == bad:
                name = f"{bad.short_form()} (sm_90)"
                raise KernelCompileError(name, "nvcc", ["error: no"], tmp_path / "log")
            progress(CompiledKernel(kernel, 1.0, 32, 0, 0, (), "", False), number, len(kernels))
        built.append(list(kernels))

    monkeypatch.setattr(tune_compile, "build_kernels", fake)
    ready, refused = tune_compile.compile_candidates([good, bad, late], 90)
    assert (ready, refused) == ({good, late}, {bad: "does not compile: error: no"})
    ready, _ = tune_compile.compile_candidates([good, late], 90, out_of_time=lambda: True)
    assert ready == {good}
    assert built[-1] == [good]  # linked without the one that came too late


def test_tables_ship_with_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"flash_helpers.results" = ["tables/*.json"]' in text
    assert tables.FOLDER.name == "tables"


# ---------------------------------------------------------------- doctor, ladder, start
def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, flash_helpers.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    commands = run("--help").stdout
    for name in ("bench", "tune", "explain", "ladder", "report", "configs", "build", "doctor", "cache"):
        assert name in commands


@pytest.mark.usefixtures("no_gpu")
def test_ladder_on_the_cpu_writes_results_and_report(tmp_path: Path) -> None:
    result = run(
        "ladder", "--out", str(tmp_path), "--rounds", "1", "--json", str(tmp_path / "steps.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "the times say nothing of a GPU" in result.output.replace("\n", " ")
    rows = json.loads((tmp_path / "ladder.json").read_text())["rows"]
    assert {tuple(row["problem"][name] for name in ("batch", "n_heads", "seq_len_q")) for row in rows} == {
        (1, 4, 256)
    }
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert [step["kernel"] for step in steps] == [
        r.config.short_form() for r in get_ladder("ampere", DType.BF16, 128, False)
    ]
    assert steps[0]["over_step_before"] is None
    assert steps[1]["over_step_before"] == pytest.approx(steps[1]["tflops"] / steps[0]["tflops"])
    assert all(step["over_peer"] > 0 for step in steps)
    assert (tmp_path / "index.html").is_file()
