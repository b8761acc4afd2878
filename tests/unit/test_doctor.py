"""The doctor: each check sees what is wrong and says what to do."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from flash_helpers.build import CompilerNotFoundError
from flash_helpers.cli import app
from flash_helpers.commands import doctor_checks as module
from flash_helpers.commands.doctor import doctor, exit_code, summary
from flash_helpers.commands.doctor_checks import BROKEN, CHECKS, LIMITED, OK, Check
from flash_helpers.results import database as database_module
from flash_helpers.results.database import TuningDatabase


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, no GPU, an empty cache."""
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASH_ATTENTION_TUNING_DB", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "driver_version", lambda: None)


def check(name: str) -> Check:
    return CHECKS[name]()


def test_a_machine_without_gpu_can_use_the_cpu() -> None:
    checks = {c.name: c for c in doctor()}
    assert list(checks) == list(CHECKS)
    assert checks["torch"].status == OK
    assert (checks["GPU"].status, checks["driver"].status) == (LIMITED, LIMITED)
    assert checks["a small call"].found.endswith("on cpu: right")
    assert all(c.advice for c in checks.values() if c.status != OK)
    assert summary(list(checks.values())).startswith("attention works on the CPU")


def test_a_driver_without_gpu_or_too_old_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "driver_version", lambda: "470.1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert check("driver").status == BROKEN
    assert "580 or newer" in check("driver").advice
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check("GPU").status == BROKEN
    assert "CUDA_VISIBLE_DEVICES is ''" in check("GPU").advice
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build of torch" in check("torch").advice


def test_gpus_are_listed_with_what_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [("NVIDIA H100", 9, 0), ("Tesla T4", 7, 5)]
    properties = [
        SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=132, total_memory=80 << 30)
        for name, major, minor in gpus
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    lines = check("GPU").found.splitlines()
    assert check("GPU").status == OK
    assert lines[0] == "cuda:0 NVIDIA H100, sm_90, 132 SMs, 80.0 GiB: runs ampere and hopper kernels"
    assert lines[1].endswith("too old for every kernel family")
    del properties[0]
    assert check("GPU").status == LIMITED


def test_no_compiler_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise CompilerNotFoundError("no usable nvcc; tried: /usr/bin/nvcc: too old\nInstall the toolkit")

    monkeypatch.setattr(module, "find_nvcc", none)
    assert check("compiler").status == LIMITED
    assert "pip install nvidia-cuda-nvcc" in check("compiler").advice
    assert "too old" in check("compiler").found


def test_variables_that_can_not_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_JOBS", "many")
    monkeypatch.setenv("FLASH_ATTENTION_JIT", "0")
    found = check("variables")
    assert found.status == BROKEN
    assert "FLASH_ATTENTION_JOBS is 'many'" in found.advice
    assert "FLASH_ATTENTION_JIT=0" in found.found


def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_CACH_DIR", "/somewhere")
    found = check("variables")
    assert found.status == LIMITED
    assert "CACH_DIR is not read; the nearest known is FLASH_ATTENTION_CACHE_DIR" in found.advice


@pytest.mark.parametrize("change", ["abi_version", "fields"])
def test_a_binding_of_another_version_is_broken(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    binding = pytest.importorskip("flash_attention_kernels")
    assert check("binding").status == OK, check("binding").found
    other = SimpleNamespace(
        __file__="old.so",
        abi_version=binding.abi_version,
        config_field_names=binding.config_field_names,
        traits_field_names=binding.traits_field_names,
    )
    if change == "abi_version":
        other.abi_version -= 1 << 24
    else:
        other.config_field_names = lambda name: [*binding.config_field_names(name)[1:], "gone"]
    monkeypatch.setitem(sys.modules, "flash_attention_kernels", other)
    found = check("binding")
    assert found.status == BROKEN
    number = binding.abi_version >> 24
    seen = rf"interface version {number - 1}\.(\w{{6}}), the kernels' headers version {number}\.\1"
    assert re.search(seen, found.found) or "other fields: dtype, gone" in found.found
    assert "build_ext" in found.advice


def test_a_tuning_database_that_can_not_be_written_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.sqlite3"
    monkeypatch.setenv("FLASH_ATTENTION_TUNING_DB", str(path))
    assert check("tuning results").status == OK
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASH_ATTENTION_TUNING_DB", str(tmp_path / "file" / "tuning.sqlite3"))
    assert check("tuning results").status == LIMITED
    TuningDatabase(path).check_writable()
    monkeypatch.setenv("FLASH_ATTENTION_TUNING_DB", str(path))
    assert check("tuning results").status == OK
    with contextlib.closing(sqlite3.connect(path)) as holder:  # what a read-only file system does
        holder.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(database_module, "READ_TIMEOUT_S", 0.01)
        monkeypatch.setattr(TuningDatabase, "devices", lambda self: [])
        found = check("tuning results")
    assert found.status == LIMITED
    assert "not writable" in found.found


def test_a_cache_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = check("kernel cache")
    assert found.status == LIMITED
    assert "FLASH_ATTENTION_CACHE_DIR" in found.advice


def test_a_failing_check_is_a_finding_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def falls() -> Check:
        raise RuntimeError("no such thing")

    monkeypatch.setitem(CHECKS, "a small call", falls)
    header = CliRunner().invoke(app, ["doctor"]).output.splitlines()[0]
    assert header.split() == ["check", "status", "found"]
    result = CliRunner().invoke(app, ["doctor", "--json", "-"])
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["summary"].startswith("attention does not work here")
    (broken,) = [c for c in document["checks"] if c["status"] == "broken"]
    assert broken["found"] == "RuntimeError: no such thing"
    assert exit_code([Check("a", OK, ""), Check("b", LIMITED, "")]) == 0
