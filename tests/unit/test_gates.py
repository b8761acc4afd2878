"""The gates over whole sets: what they take, what is recorded, and a few kernels compiled for each target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flash_helpers.build import BuildResult, KernelCache, build_library
from flash_helpers.build.gates import (
    AMPERE_RECORD,
    HOPPER_RECORD,
    TARGETS,
    compared_kernels,
    kernels_of,
    load_record,
    machine_code,
    per_256_products,
    violations,
)
from flash_helpers.build.sass import find_tool
from flash_helpers.kernel_configs import (
    FlashForwardKernelConfig,
    ForwardKernel,
    get_ampere_best_kernels,
    get_hopper_kernels_to_build,
    get_kernels_to_build,
)
from flash_helpers.kernels.hopper.forward.gates import MAX_DRIFT

# Bounded: two of each target's compared kernels. `python -m flash_helpers.build.gates` takes all.
SAMPLE = {80: slice(1, 3), 86: slice(3, 4), 89: slice(3, 4), 90: slice(1, 2)}


@pytest.mark.parametrize("target", TARGETS)
def test_everything_that_is_built_or_chosen_is_checked(target: int) -> None:
    kernels = set(kernels_of(target))
    assert {ForwardKernel(config) for config in get_kernels_to_build()} <= kernels
    assert set(get_ampere_best_kernels(capability=divmod(target, 10))) <= kernels
    assert (set(get_hopper_kernels_to_build()) <= kernels) == (target == 90)


def test_every_hopper_kernel_has_recorded_counts() -> None:
    """After a new choice: python -m flash_helpers.build.gates --target 90 --record."""
    recorded = load_record(HOPPER_RECORD)
    missing = [k.short_form() for k in get_hopper_kernels_to_build() if k.short_form() not in recorded]
    assert missing == []
    for name, counts in recorded.items():
        assert counts["HGMMA"] > 0, name
        assert counts["SYNCS"] == 4, name


@pytest.mark.parametrize("target", TARGETS)
def test_each_generation_is_compared_with_sm_90(target: int) -> None:
    record = load_record(AMPERE_RECORD)
    for kernel in compared_kernels(target):
        counts = record[kernel.short_form()]
        assert counts[str(target)] <= 1.15 * counts["90"], "more is lost in translation than the docs say"


@pytest.fixture(scope="module", params=TARGETS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    if find_tool("cuobjdump") is None:
        pytest.skip("no cuobjdump: pip install -r requirements/cuda-compiler.txt")
    cache = KernelCache(tmp_path_factory.mktemp("cache"))
    return build_library(compared_kernels(request.param)[SAMPLE[request.param]], request.param, cache=cache)


@pytest.mark.compile
def test_choices_pass_the_gates_with_the_recorded_counts(built: BuildResult) -> None:
    record = load_record(AMPERE_RECORD)
    code = machine_code(built.path, [compiled.kernel for compiled in built.kernels])
    assert built.kernels
    for compiled in built.kernels:
        kernel, body = compiled.kernel, code[compiled.kernel]
        assert isinstance(kernel.config, FlashForwardKernelConfig)
        assert violations(compiled, body) == []
        expected = record[kernel.short_form()][str(built.target)]
        assert per_256_products(kernel.config, body) == pytest.approx(expected, rel=MAX_DRIFT)
        spilled = [replace(i, opcode="LDL") if i.name == "LDSM" else i for i in body]
        assert any("accesses to local memory" in text for text in violations(compiled, spilled))


@pytest.mark.compile
def test_a_kernel_that_is_not_in_a_library_is_named(built: BuildResult) -> None:
    other = next(k for k in map(ForwardKernel, get_kernels_to_build()))
    with pytest.raises(ValueError, match="does not hold"):
        machine_code(Path(built.path), [other])
