"""What ``python -m tests.ahead`` reads, and what it builds of it, without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attention.mods.tracing import trace
from flash_attention.run.availability import RELIEFS, TOLERATED_SPILLS
from flash_helpers import build
from flash_helpers.kernels.device_facts import device_facts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import directions, family_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import FORWARD, AttentionProblem
from flash_helpers.select.candidates import kernel_for
from tests.ahead import building, outcomes, recorded
from tests.ahead.__main__ import main
from tests.ahead.host_tensor import HostTensor, held
from tests.ahead.pretending import FOLDER, LIMIT
from tests.ahead.recorded import Journal

ROOT = Path(__file__).parents[2]


def kernel_with_mod(family: str) -> Kernel:
    mod = trace(lambda score, b, h, q, k: score + q - k, None, device="cpu").mod
    problem = AttentionProblem(DType.FP16, 1, 64, 64, 2, 2, 128, 128, mod=mod)
    (direction,) = (d for d in directions(FORWARD) if d.family.name == family)
    defaults = direction.defaults(problem, device_facts("H200"))
    assert defaults is not None
    return kernel_for(defaults.whole[0], problem)


def plain_kernels() -> list[Kernel]:
    return [direction.built()[0] for direction in directions(FORWARD)]


# ---------------------------------------------------------------------- what was asked for
def test_kernels_are_written_once_and_read_in_order(tmp_path: Path) -> None:
    with_mod, (first, second) = kernel_with_mod("ampere"), plain_kernels()
    journal = Journal(tmp_path / "1.asked")
    for kernel in (first, with_mod, first):
        journal.ask(kernel)
    journal.ask(with_mod, chosen=True)
    Journal(tmp_path / "2.asked").ask(second)
    assert list(recorded.read(tmp_path).items()) == [(first, False), (with_mod, True), (second, False)]


def test_a_folder_that_others_can_write_is_not_read(tmp_path: Path) -> None:
    Journal(tmp_path / "1.asked").ask(plain_kernels()[0])
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="you alone can write"):
        recorded.read(tmp_path)


def test_an_unknown_device_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["ask", str(tmp_path / "new"), "--device", "H20", "--", "-c", "1"])
    assert "unknown device 'H20'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


CASES = """
import time
import pytest

@pytest.fixture
def slow():
    time.sleep(60)

def test_passes():
    pass

def test_is_skipped():
    pytest.skip()

def test_fails():
    assert 1 + 1 == 3

def test_takes_long():
    time.sleep(60)

def test_waits_for_a_fixture(slow):
    pass
"""


def test_the_outcome_of_each_test_is_kept_and_long_ones_end(tmp_path: Path) -> None:
    (tmp_path / "test_case.py").write_text(CASES)
    variables = {FOLDER: str(tmp_path), LIMIT: "1", "PYTHONPATH": str(ROOT)}
    command = ["-q", "-p", "tests.ahead.outcomes", "-p", "no:cacheprovider", "-c", "/dev/null"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *command, f"--rootdir={tmp_path}", "test_case.py"],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        timeout=120,
        check=False,
    )
    ends = {name.partition("::")[2]: end for name, end in outcomes.read(tmp_path).items()}
    kinds = {name: kind for name, (kind, _) in ends.items()}
    assert kinds == {
        "test_passes": "passed",
        "test_is_skipped": "skipped",
        "test_fails": "failed",
        "test_takes_long": "failed",
        "test_waits_for_a_fixture": "failed",
    }
    assert "TooLongError" in ends["test_takes_long"][1]
    assert "TooLongError" in ends["test_waits_for_a_fixture"][1]


# ---------------------------------------------------------------------- what is built of it
@dataclass
class Built:
    """What a compiler that is not there was asked for, call by call; ``spills`` are bytes a thread."""

    calls: list[list[Kernel]]
    spills: Callable[[Kernel], int] = lambda kernel: 0

    def __call__(self, kernels: Any, targets: Any, jobs: Any = None, *, cache: Any = None) -> list[Any]:
        kernels = list(kernels)
        self.calls.append(kernels)
        compiled = [
            SimpleNamespace(kernel=kernel, cached=False, spill_bytes=self.spills(kernel))
            for kernel in kernels
        ]
        return [SimpleNamespace(kernels=compiled)]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    builder = Built([])
    monkeypatch.setattr(build, "build_kernels", builder)
    return builder


def test_all_are_in_one_library_in_the_end(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(building, "AT_ONCE", 1)
    first, second = plain_kernels()
    for i, kernel in enumerate((first, second)):
        (tmp_path / str(i)).mkdir(mode=0o700)
        Journal(tmp_path / str(i) / "1.asked").ask(kernel)
    code = building.build_all([tmp_path / "1", tmp_path / "0"], tmp_path / "cache", "H200")
    assert code == 0
    assert built.calls == [[second], [first], [second, first]]
    assert "2 kernels for H200" in capsys.readouterr().out


def test_folders_without_kernels_are_refused(built: Built, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run ask first"):
        building.build_all([tmp_path, tmp_path / "absent"], tmp_path / "cache", "H200")


def test_families_that_do_not_run_there_are_left_out(built: Built, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    journal = Journal(tmp_path / "1.asked")
    for kernel in plain_kernels():
        journal.ask(kernel)
    assert building.build_all([tmp_path], tmp_path / "cache", "A100") == 0
    assert [family_of(kernel).name for kernel in built.calls[-1]] == ["ampere"]


def test_no_kernel_is_begun_behind_the_end_and_the_status_says_so(built: Built, tmp_path: Path) -> None:
    Journal(tmp_path / "1.asked").ask(plain_kernels()[0])
    assert building.build_all([tmp_path], tmp_path / "cache", "H200", seconds=-1) == 1
    assert built.calls == []


def test_what_the_compiler_refuses_is_named_and_the_others_are_built(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = plain_kernels()

    def refuse(kernels: Any, *rest: Any, **named: Any) -> Any:
        kernels = list(kernels)
        if bad in kernels:
            raise build.KernelCompileError("it", "nvcc", ["too many registers"], Path("log"))
        return built(kernels, *rest, **named)

    monkeypatch.setattr(build, "build_kernels", refuse)
    journal = Journal(tmp_path / "1.asked")
    journal.ask(bad)
    journal.ask(good)
    assert building.build_all([tmp_path], tmp_path / "cache", "H200") == 1
    assert built.calls[-1] == [good]
    assert f"not compiled: {bad.short_form()}" in capsys.readouterr().out


@pytest.mark.parametrize("chosen", [True, False])
def test_chosen_kernels_that_spill_bring_those_that_take_their_place(
    built: Built, tmp_path: Path, chosen: bool
) -> None:
    built.spills = lambda kernel: TOLERATED_SPILLS + 1
    kernel = kernel_with_mod("hopper")
    Journal(tmp_path / "1.asked").ask(kernel, chosen)
    assert building.build_all([tmp_path], tmp_path / "cache", "H200") == 0
    found = built.calls[-1]
    (direction,) = (d for d in directions(FORWARD) if d.family.name == "hopper")
    expected = [kernel]
    for _ in range(RELIEFS if chosen else 0):
        config = direction.relieved(expected[-1].config)
        if config is None:
            break
        expected.append(replace(kernel, config=config))
    assert found == expected
    assert (len(found) > 1) == chosen


# ---------------------------------------------------------------------- tensors
def test_everything_in_a_call_is_held_by_the_host() -> None:
    @dataclass(frozen=True)
    class Call:
        q: torch.Tensor
        rest: tuple[Any, ...]
        named: dict[str, Any]

    x, plain = torch.arange(6.0), torch.ones(2)
    part = x[2:]
    call = held(Call(HostTensor(x), (HostTensor(part), None, plain), {"a": [HostTensor(x)], "b": 3}))
    assert call.q is x
    assert call.rest[0] is part
    assert call.rest[1] is None
    assert call.rest[2] is plain
    assert call.named["a"][0] is x
    assert call.named["b"] == 3
