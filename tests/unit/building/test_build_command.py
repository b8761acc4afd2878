"""``python -m flash_helpers.build``: the command that error messages name."""

import shlex

import pytest

from flash_helpers.build import KernelCache, build_command, find_library, sources
from flash_helpers.build import compile as compile_module
from flash_helpers.build.__main__ import main, parse_kernel
from flash_helpers.kernel_configs import ForwardKernel, ForwardTraits


@pytest.fixture(autouse=True)
def small_build(monkeypatch, tmp_path, small_root, fake_nvcc):
    monkeypatch.setattr(sources, "include_root", lambda: small_root)
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: fake_nvcc.nvcc)
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))


def test_the_command_builds_the_kernel(kernel, capsys):
    causal = ForwardKernel(kernel.config, ForwardTraits(causal=True))
    for member in (kernel, causal):
        python, dash_m, module, *arguments = shlex.split(build_command(member, 86))
        assert (python, dash_m, module) == ("python", "-m", "flash_helpers.build")
        assert find_library(KernelCache(), member, 86) is None
        assert main(arguments) == 0
        library = find_library(KernelCache(), member, 86)
        assert f"sm_86: 1 kernels, 1 compiled now: {library}" in capsys.readouterr().out


def test_a_set_for_several_targets(fake_nvcc, capsys):
    assert main(["--set", "prog", "--target", "90", "--target", "80"]) == 0
    assert [call.rsplit(".", 1)[-1] for call in fake_nvcc.calls].count("o") == 14
    assert main(["--set", "prog", "--target", "90"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("sm_90: 7 kernels, 0 compiled now: ")


def test_parse_kernel_reads_ids_back(kernel):
    for traits in (ForwardTraits(), ForwardTraits(causal=True)):
        member = ForwardKernel(kernel.config, traits)
        assert parse_kernel(member.short_form()) == member
    with pytest.raises(ValueError, match=r"unknown trait casual in .*; known: causal"):
        parse_kernel(f"{kernel.short_form()} | casual")


@pytest.mark.parametrize("arguments", [["nonsense"], ["--set", "nonsense"]])
def test_errors_are_said_and_exit_with_1(arguments, capsys):
    assert main(["--target", "80", *arguments]) == 1
    assert "nonsense" in capsys.readouterr().err
