"""Facts of a GPU that a caller made up: what no GPU has is refused by its name."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

import flash_attention
from flash_helpers.kernel_configs import device_facts
from flash_helpers.kernels.device_facts import KNOWN_DEVICES, RATES, DeviceFacts

H100 = device_facts("H100")
NUMBERS = [f.name for f in fields(DeviceFacts)][2:]


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, None, "x", True])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_no_gpu_has_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"DeviceFacts\.{name} is .*it must be a"):
        replace(H100, **{name: value})


@pytest.mark.parametrize(
    "name", [n for n in NUMBERS if n not in (*RATES, "l2_bytes", "smem_reserved_per_block")]
)
def test_what_every_gpu_has_is_not_zero(name: str) -> None:
    with pytest.raises(ValueError, match=rf"DeviceFacts\.{name} is 0; it must be a whole number, 1 or more"):
        replace(H100, **{name: 0})


@pytest.mark.parametrize("capability", [None, 9, "9.0", (9,), (9, 0, 0), (9.0, 0), (-9, 0)])
def test_a_capability_is_a_pair(capability: object) -> None:
    with pytest.raises(TypeError, match=r"DeviceFacts\.capability is .*such as \(9, 0\)"):
        replace(H100, capability=capability)


def test_a_name_is_a_text() -> None:
    with pytest.raises(TypeError, match=r"DeviceFacts\.name is None; it must be a text"):
        replace(H100, name=None)


@pytest.mark.parametrize("device", KNOWN_DEVICES)
@pytest.mark.parametrize("unknown", [RATES, *((name,) for name in (*RATES, "l2_bytes"))], ids="+".join)
def test_a_choice_needs_no_rates(device: str, unknown: tuple[str, ...]) -> None:
    """A GPU that the library has no datasheet of has the rates 0."""
    q = torch.empty(2, 512, 8, 64, dtype=torch.bfloat16)
    known = device_facts(device)
    facts = replace(known, **dict.fromkeys(unknown, 0))
    choice = flash_attention.explain_choice(q, q, q, facts=facts)
    assert choice.kernel == flash_attention.explain_choice(q, q, q, facts=known).kernel
