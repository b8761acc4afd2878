"""Where the L2 cache drops keys first: no two blocks read the same ones."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.device_facts import device_facts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.defaults import defaults
from flash_helpers.kernels.problem import AttentionProblem

DECODE = AttentionProblem(DType.BF16, 8, 4, 8192, 8, 8, 128, 128)  # 32 query heads over 8, packed
PROMPT = replace(DECODE, seq_len_q=2048)


def once(problem: AttentionProblem) -> bool:
    """Of the kernel that takes keys in parts, where there are parts, in the place of the default."""
    found = defaults(problem, device_facts("H200"))
    assert found is not None
    config = found.split[0]
    assert isinstance(config, HopperForwardKernelConfig)
    return config.keys_once


def test_sequences_that_decode_read_keys_once() -> None:
    for invariant in (False, True):
        assert once(replace(DECODE, invariant=invariant))
        assert once(replace(DECODE, invariant=invariant, cached=True, paged=True, varlen=True))


def test_prompts_and_heads_that_share_keys_read_them_again() -> None:
    for invariant in (False, True):
        assert not once(replace(PROMPT, invariant=invariant))
        assert not once(replace(DECODE, invariant=invariant, n_heads=32, n_heads_kv=8))


def test_planned_kernels_have_the_heads_that_share_keys_as_rows() -> None:
    planned = replace(DECODE, seq_len_q=1, n_heads=32, n_heads_kv=8, varlen=True, planned=True)
    for invariant in (False, True):
        assert once(replace(planned, invariant=invariant))
        assert not once(replace(planned, invariant=invariant, seq_len_q=17))  # 68 rows
