"""The configurations for decoding run, twice on each SM, on the GPUs that they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_helpers.kernel_configs import KNOWN_DEVICES, DType
from flash_helpers.kernels.ampere.forward.config import D_HEADS
from flash_helpers.kernels.ampere.forward.decode import choose_ampere_decode_config

H100 = KNOWN_DEVICES["H100"]


@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("device", KNOWN_DEVICES)
def test_two_blocks_fit_an_sm(device: str, d_head: int) -> None:
    facts = KNOWN_DEVICES[device]
    config = choose_ampere_decode_config(DType.BF16, d_head, facts)
    assert config.infeasible_reason(facts) is None
    assert facts.smem_per_sm // (config.smem_bytes() + facts.smem_reserved_per_block) >= 2


@pytest.mark.parametrize(
    ("device", "d_head", "tile"),
    [
        ("H100", 64, (64, 4)),
        ("H100", 128, (64, 3)),
        ("H100", 256, (32, 2)),
        ("A100", 128, (64, 2)),
        ("RTX4090", 128, (32, 2)),
        ("RTX4090", 256, (16, 1)),
    ],
)
def test_tiles_and_stages(device: str, d_head: int, tile: tuple[int, int]) -> None:
    config = choose_ampere_decode_config(DType.FP16, d_head, KNOWN_DEVICES[device])
    assert (config.B_c, config.kv_stages) == tile
    assert config.dtype == DType.FP16
    assert config.mbarrier == (config.kv_stages > 1)


def test_shared_memory_decides_not_the_generation() -> None:
    small = replace(H100, capability=(12, 0), smem_per_sm=100 * 1024, smem_per_block=99 * 1024)
    config = choose_ampere_decode_config(DType.BF16, 128, small)
    assert config == choose_ampere_decode_config(DType.BF16, 128, KNOWN_DEVICES["RTX4090"])
