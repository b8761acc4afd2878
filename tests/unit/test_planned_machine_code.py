"""Kernels that plan their work on the device: they compile for each GPU generation without spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_helpers.build import KernelCache, build_library
from flash_helpers.build.ptxas import parse_ptxas
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


@pytest.mark.compile
@pytest.mark.parametrize("target", KERNELS)
def test_ptxas_neither_spills_nor_serializes(target: int, tmp_path: Path) -> None:
    result = build_library(KERNELS[target], target, cache=KernelCache(tmp_path))
    reports = {compiled.kernel.short_form(): parse_ptxas(compiled.log) for compiled in result.kernels}
    assert len(reports) == len(KERNELS[target])
    assert {name: (r.spill_bytes, r.warnings) for name, r in reports.items()} == dict.fromkeys(
        reports, (0, ())
    )


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
