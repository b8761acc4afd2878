"""What a backward launch wants beside gradients: a float32 dQ, 8 bytes a row and head (contract C46)."""

from __future__ import annotations

from dataclasses import replace

import flash_attention_kernels as binding
import pytest
from test_binding_backward import SIZES, Problem, arguments

from flash_helpers import build
from flash_helpers.kernel_configs import BackwardKernel, DType
from flash_helpers.kernels.ampere.backward.choices import choices_for
from flash_helpers.kernels.ampere.backward.config import DQSum
from flash_helpers.kernels.traits import BackwardTraits

pytestmark = pytest.mark.compile

TARGET = 80
TRAITS = BackwardTraits(causal=True, varlen=True, padded_head=True)
SUM_ROWS = 16  # the sums of a sequence end with a whole tile


@pytest.fixture(scope="module", params=[DQSum.ATOMIC, DQSum.ORDERED], ids=lambda how: how.name)
def kernel(request: pytest.FixtureRequest):
    config = choices_for((8, 0))[0].form(DType.BF16, False)
    wanted = BackwardKernel(replace(config, dq_sum=request.param), TRAITS)
    build.build_kernels([wanted], [TARGET])
    binding.load_library(str(build.find_library(build.KernelCache(), wanted, TARGET)))
    return binding.find(wanted.config, wanted.traits, TARGET)


@pytest.mark.parametrize("d_head", [8, 40, 64])
@pytest.mark.parametrize("seq_len_q", [1, 15, 16, 700, 4096])
def test_of_sequences_of_one_length(kernel, seq_len_q: int, d_head: int) -> None:
    batch, n_heads = 3, 6
    sizes = dict(zip(SIZES, (batch, n_heads, 3, seq_len_q, 90, d_head, d_head), strict=True))
    lse_log2, dq_sums, counters = kernel.workspaces(arguments(Problem(), cu_seqlens_q=0, **sizes))
    rows = batch * n_heads * seq_len_q
    delta = 4 * rows
    assert delta + lse_log2 + counters <= 8 * rows
    assert dq_sums <= 4 * d_head * batch * n_heads * -(-seq_len_q // SUM_ROWS) * SUM_ROWS


@pytest.mark.parametrize(("batch", "total_q"), [(1, 1), (100, 5000), (3, 3)])
def test_of_packed_sequences(kernel, batch: int, total_q: int) -> None:
    n_heads, d_head = 6, 40
    sizes = dict(zip(SIZES, (batch, n_heads, 3, 200, 90, d_head, d_head), strict=True))
    lse_log2, dq_sums, counters = kernel.workspaces(arguments(Problem(), total_q=total_q, **sizes))
    rows = n_heads * total_q
    assert 4 * rows + lse_log2 + counters <= 8 * rows
    assert dq_sums <= 4 * d_head * (rows + n_heads * batch * SUM_ROWS)


def test_without_dq_nothing_is_summed(kernel) -> None:
    sizes = dict(zip(SIZES, (2, 6, 3, 100, 90, 64, 64), strict=True))
    found = kernel.workspaces(arguments(Problem(), dq=0, cu_seqlens_q=0, **sizes))
    assert found == (4 * 2 * 6 * 100, 0, 0)
