"""``flash-attention build``: the command that error messages name, on a fake compiler."""

import shlex

import pytest

from flash_helpers.build import KernelCache, build_command, find_library, sources
from flash_helpers.build import compile as compile_module
from flash_helpers.cli import main
from flash_helpers.kernel_configs import ForwardKernel, ForwardTraits
from flash_helpers.kernel_selection import parse_kernel


@pytest.fixture(autouse=True)
def small_build(monkeypatch, tmp_path, small_root, fake_nvcc):
    monkeypatch.setattr(sources, "include_root", lambda: small_root)
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: fake_nvcc.nvcc)
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["flash-attention", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code or 0


def test_the_command_builds_the_kernel(kernel, monkeypatch):
    causal = ForwardKernel(kernel.config, ForwardTraits(causal=True))
    for member in (kernel, causal):
        python, dash_m, module, *arguments = shlex.split(build_command(member, 86))
        assert (python, dash_m, module) == ("python", "-m", "flash_attention")
        assert find_library(KernelCache(), member, 86) is None
        assert run(monkeypatch, *arguments) == 0
        assert find_library(KernelCache(), member, 86) is not None


def test_a_set_for_several_targets(fake_nvcc, monkeypatch):
    assert run(monkeypatch, "build", "prog", "--target", "90,80") == 0
    assert [call.rsplit(".", 1)[-1] for call in fake_nvcc.calls].count("o") == 14
    compiled = len(fake_nvcc.calls)
    assert run(monkeypatch, "build", "prog", "--target", "90") == 0
    assert len(fake_nvcc.calls) == compiled


def test_parse_kernel_reads_ids_back(kernel):
    for traits in (ForwardTraits(), ForwardTraits(causal=True), ForwardTraits(causal=True, varlen=True)):
        member = ForwardKernel(kernel.config, traits)
        assert parse_kernel(member.short_form()) == member
    with pytest.raises(ValueError, match=r"unknown trait 'casual'; known: causal"):
        parse_kernel(f"{kernel.short_form()} | casual")


@pytest.mark.parametrize("kernels", ["nonsense", "(FP16, 64): nonsense"])
def test_errors_are_said_and_exit_with_2(kernels, monkeypatch, capsys):
    assert run(monkeypatch, "build", kernels, "--target", "80") == 2
    assert "nonsense" in capsys.readouterr().err
