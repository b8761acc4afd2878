"""Compiling and linking: one file a kernel, keys that follow every input, errors that can be read."""

import dataclasses

import pytest

from flash_helpers.build import (
    KernelCache,
    KernelCompileError,
    build_kernels,
    build_library,
    built_kernels,
    find_library,
    flags,
)
from flash_helpers.build import compile as compile_module
from flash_helpers.build.ptxas import parse_ptxas
from flash_helpers.kernel_configs import DType, ForwardKernel, ForwardTraits

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1k' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Function properties for _Z1k
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size, 4096 bytes smem
"""


def kernels_of(kernel, n):
    return [
        dataclasses.replace(kernel, config=dataclasses.replace(kernel.config, B_c=16 * (i + 1)))
        for i in range(n)
    ]


@pytest.fixture
def build(cache, small_root, fake_nvcc):
    def build(kernels, target=80, **kwargs):
        return build_library(
            kernels, target, cache=cache, include_root=small_root, nvcc=fake_nvcc.nvcc, **kwargs
        )

    return build


def suffixes(fake_nvcc):
    return sorted(call.rsplit(".", 1)[-1] for call in fake_nvcc.calls)


def test_parse_ptxas():
    report = parse_ptxas(LOG)
    assert (report.registers, report.spill_bytes, report.static_smem_bytes) == (168, 32, 4096)
    assert len(report.warnings) == 1
    assert "(C7510)" in report.warnings[0]


def test_adding_a_kernel_compiles_one_file(build, kernel, fake_nvcc):
    three = kernels_of(kernel, 3)
    first = build(three[:2])
    assert suffixes(fake_nvcc) == ["o", "o", "so"]
    second = build(three)
    assert suffixes(fake_nvcc) == ["o", "o", "o", "so", "so"]
    assert first.path != second.path
    assert [compiled.cached for compiled in second.kernels].count(False) == 1
    assert all(compiled.registers == 32 for compiled in second.kernels)
    assert build(list(reversed(three))).path == second.path
    assert len(fake_nvcc.calls) == 5


def test_every_input_is_part_of_the_key(build, kernel, fake_nvcc, small_root, cache, monkeypatch):
    paths = [build([kernel]).path, build([kernel], target=86).path]
    inner = small_root / "ampere" / "inner.cuh"
    inner.write_text(inner.read_text() + "// changed\n")
    paths.append(build([kernel]).path)
    newer = dataclasses.replace(fake_nvcc.nvcc, build="13.0.99")
    paths.append(build_library([kernel], 80, cache=cache, include_root=small_root, nvcc=newer).path)
    monkeypatch.setattr(flags, "COMPILE_FLAGS", (*flags.COMPILE_FLAGS, "-lineinfo"))
    paths.append(build([kernel]).path)
    assert suffixes(fake_nvcc) == ["o"] * 5 + ["so"] * 5
    assert len(set(paths)) == 5


def test_progress_is_told_of_every_kernel(build, kernel):
    told = []
    build(
        kernels_of(kernel, 3),
        progress=lambda compiled, done, total: told.append((compiled.kernel, done, total)),
    )
    assert [entry[1:] for entry in told] == [(1, 3), (2, 3), (3, 3)]
    assert {entry[0] for entry in told} == set(kernels_of(kernel, 3))


def test_bad_requests(build, kernel):
    with pytest.raises(ValueError, match="exactly one direction of one family; given: none"):
        build([])
    with pytest.raises(ValueError, match=r"target 75: .* run on sm_80 and newer"):
        build([kernel], target=75)
    with pytest.raises(TypeError, match="configuration of type str; known: FlashForwardKernelConfig"):
        build([dataclasses.replace(kernel, config="no")])


def test_compile_error_names_command_errors_and_log(cache, small_root, kernel, tmp_path):
    from fake_nvcc import FakeNvcc

    body = "echo 'a.cuh(7): warning: fine'\necho 'a.cuh(8): error: static assertion failed: B_r' >&2\nexit 2"
    fake = FakeNvcc(tmp_path / "failing", body)
    with pytest.raises(KernelCompileError) as caught:
        build_library([kernel], 80, cache=cache, include_root=small_root, nvcc=fake.nvcc)
    error = caught.value
    assert error.errors == ("a.cuh(8): error: static assertion failed: B_r",)
    assert error.command.startswith(f"{fake.path} -std=c++20")
    assert "warning: fine" in error.log.read_text()
    for part in (kernel.short_form(), "static assertion failed: B_r", error.command, str(error.log), "sm_80"):
        assert part in str(error)


def test_default_jobs(monkeypatch):
    monkeypatch.setattr(compile_module.os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("FLASH_ATTENTION_JOBS", raising=False)
    monkeypatch.setattr(compile_module, "available_memory", lambda: 8 << 30)
    assert compile_module.default_jobs() == 4  # two cores and 8 GB must not be filled
    monkeypatch.setattr(compile_module, "available_memory", lambda: 1 << 30)
    assert compile_module.default_jobs() == 1
    monkeypatch.setenv("FLASH_ATTENTION_JOBS", "3")
    assert compile_module.default_jobs() == 3


def test_available_memory_is_a_sensible_figure():
    assert 64 << 20 < compile_module.available_memory() < 1 << 46


# ---------------------------------------------------------------- ahead of time
def test_index_finds_what_was_built(cache, small_root, kernel, fake_nvcc, monkeypatch):
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: fake_nvcc.nvcc)
    kernels = kernels_of(kernel, 2)
    results = build_kernels(kernels, [80, 86, 75], cache=cache, include_root=small_root)
    assert [result.target for result in results] == [80, 86]
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: pytest.fail("looked for a compiler"))
    for result in results:
        for member in kernels:
            assert find_library(cache, member, result.target, small_root) == result.path
    assert find_library(cache, kernels[0], 90, small_root) is None
    assert (
        find_library(cache, ForwardKernel(kernels[0].config, ForwardTraits(causal=True)), 80, small_root)
        is None
    )
    assert built_kernels(cache, [86], small_root) == sorted((member.short_form(), 86) for member in kernels)


def test_index_forgets_kernels_of_other_headers(cache, small_root, kernel, fake_nvcc, monkeypatch):
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: fake_nvcc.nvcc)
    build_kernels([kernel], [80], cache=cache, include_root=small_root)
    inner = small_root / "ampere" / "inner.cuh"
    inner.write_text(inner.read_text() + "// changed\n")
    assert find_library(cache, kernel, 80, small_root) is None
    assert built_kernels(cache, [80], small_root) == []


def test_index_survives_damage(cache, small_root, kernel, fake_nvcc, monkeypatch):
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: fake_nvcc.nvcc)
    (result,) = build_kernels([kernel], [80], cache=cache, include_root=small_root)
    result.path.write_text("garbage")
    assert find_library(cache, kernel, 80, small_root) is None
    (again,) = build_kernels([kernel], [80], cache=cache, include_root=small_root)
    assert find_library(cache, kernel, 80, small_root) == again.path
    (entry,) = (cache.store / "index").glob("*/*.json")
    for text in ("", "[]", "{}", "\x00"):
        entry.write_text(text)
        assert find_library(cache, kernel, 80, small_root) is None


def test_build_kernels_refuses_targets_without_a_family(cache, small_root, kernel):
    with pytest.raises(
        ValueError, match=r"targets \[75\]: kernels of the ampere family run on sm_80 and newer"
    ):
        build_kernels([kernel], [75], cache=cache, include_root=small_root)


# ---------------------------------------------------------------- the real compiler
@pytest.mark.compile
def test_real_compiler_builds_a_library_in_a_folder_with_a_space(tmp_path, small_root, kernel):
    cache = KernelCache(tmp_path / "a cache")
    bf16 = ForwardKernel(
        dataclasses.replace(kernel.config, dtype=DType.BF16, d_head=64), ForwardTraits(causal=True)
    )
    result = build_library([kernel, bf16], 80, cache=cache, include_root=small_root)
    assert result.path.read_bytes()[:4] == b"\x7fELF"
    for compiled in result.kernels:
        assert compiled.registers > 0
        assert compiled.spill_bytes == 0
        assert not compiled.cached


@pytest.mark.compile
def test_real_compiler_error(cache, small_root, kernel):
    (small_root / "ampere" / "inner.cuh").write_text('static_assert(false, "B_r must be positive");\n')
    with pytest.raises(KernelCompileError, match="B_r must be positive") as caught:
        build_library([kernel], 80, cache=cache, include_root=small_root)
    assert "inner.cuh" in caught.value.errors[0]
