"""Kernels that plan their work on the device: they compile for each GPU generation without spills."""

from __future__ import annotations

import pytest

from flash_helpers.build import BuildResult, KernelCache, build_library
from flash_helpers.build.control_flow import ControlFlow
from flash_helpers.build.gates import machine_code
from flash_helpers.build.ptxas import parse_ptxas
from flash_helpers.build.sass import Instruction, find_tool
from flash_helpers.kernel_configs import (
    DType,
    ForwardKernel,
    ForwardTraits,
    choose_hopper_kernel,
    device_facts,
)
from flash_helpers.kernels.ampere.forward.decode import (
    choose_ampere_decode_config,
    choose_ampere_planned_config,
)
from flash_helpers.kernels.traits import Traits


def traits(*names: str) -> ForwardTraits:
    return ForwardTraits(varlen=True, planned=True, **dict.fromkeys(names, True))


def hopper(d_head: int, rows: int, *names: str) -> ForwardKernel:
    on = traits(*names)
    return choose_hopper_kernel(DType.BF16, d_head, on.causal, rows, traits=on)[0]


def ampere(d_head: int, *names: str, decoding: bool, device: str = "A100") -> ForwardKernel:
    choose = choose_ampere_decode_config if decoding else choose_ampere_planned_config
    return ForwardKernel(choose(DType.BF16, d_head, device_facts(device)), traits(*names))


KERNELS = {
    90: [
        hopper(128, 2048, "causal", "paged"), hopper(128, 8, "causal"), hopper(64, 2048, "window", "paged"),
        hopper(256, 2048, "causal", "sinks", "paged"), hopper(192, 2048, "causal", "paged"),
    ],
    80: [
        ampere(128, "paged", decoding=True), ampere(128, "window", "paged", decoding=False),
        ampere(256, "causal", "softcap", "sinks", "paged", decoding=False),
        ampere(64, "causal", decoding=False), ampere(256, "paged", decoding=True, device="RTX3090"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[int, BuildResult]:
    """The kernels of each GPU generation."""
    cache = KernelCache(tmp_path_factory.mktemp("cache"))
    return {target: build_library(kernels, target, cache=cache) for target, kernels in KERNELS.items()}


@pytest.mark.compile
@pytest.mark.parametrize("target", KERNELS)
def test_ptxas_neither_spills_nor_serializes(built: dict[int, BuildResult], target: int) -> None:
    reports = {c.kernel.short_form(): parse_ptxas(c.log) for c in built[target].kernels}
    assert len(reports) == len(KERNELS[target])
    assert {name: (r.spill_bytes, r.warnings) for name, r in reports.items()} == dict.fromkeys(
        reports, (0, ())
    )


def copying_loops(body: list[Instruction]) -> list[list[Instruction]]:
    """The innermost loops that issue bulk copies, as a warp goes through them whose lanes are together."""
    flow = ControlFlow(body)
    apart = {i.target for i in body if i.opcode == "BRA.DIV"}
    asides = frozenset(n for n, block in enumerate(flow.blocks) if block[0].address in apart)
    copying = [
        loop
        for loop in flow.natural_loops()
        if any(i.name == "UTMALDG" for i in flow.instructions(loop.blocks))
    ]
    innermost = [loop for loop in copying if not any(other.blocks < loop.blocks for other in copying)]
    return [flow.instructions(flow.cycle(loop, asides)) for loop in innermost]


@pytest.mark.compile
@pytest.mark.skipif(find_tool("cuobjdump") is None, reason="there is no cuobjdump")
@pytest.mark.parametrize("kernel", [k for k in KERNELS[90] if k.traits.paged], ids=ForwardKernel.short_form)
def test_a_copy_from_a_page_waits_for_no_page_table(
    built: dict[int, BuildResult], kernel: ForwardKernel
) -> None:
    loops = copying_loops(machine_code(built[90].path, KERNELS[90])[kernel])
    assert len(loops) == 3, "K, V, and V of the last tile"
    for loop in loops:
        names = [i.name for i in loop]
        assert "LDG" not in names
        assert len(loop) <= 20 + 6 * names.count("UTMALDG"), "of lookups, or of loops over threads"


@pytest.mark.parametrize(
    ("given", "words"),
    [(ForwardTraits(planned=True), "it needs varlen"), (traits("split"), "turn split off")],
    ids=["varlen", "split"],
)
def test_traits_that_no_kernel_has_together(given: Traits, words: str) -> None:
    for kernel in (KERNELS[90][0], KERNELS[80][0]):
        reason = kernel.config.malformed_reason(given)
        assert reason is not None
        assert words in reason
