"""Ten questions of a kernel engineer, each answered by ``explain`` with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_helpers.explain import Explanation, explain
from flash_helpers.explain.explanation import Compiled, Performance
from flash_helpers.kernel_configs import device_facts, parse_kernel_name_into_config
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem
from flash_helpers.select.choice import attention_problem

H100, A100 = device_facts("H100"), device_facts("A100")
HOPPER = parse_kernel_name_into_config(
    "(BF16, 128, 128, 128, 2wg): tma+kv_2+q_1+overlap+ping_pong+lagged+forced_overlap+direct+sections"
)
AMPERE = parse_kernel_name_into_config(
    "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
)
PROMPT = Problem(DType.BF16, 16, 16, 4096, 128)
HALF = Problem(DType.FP16, 16, 16, 4096, 128)


def of(e: Explanation) -> Performance:
    """What the kernel can do; it runs there."""
    assert e.performance is not None, e.infeasible
    return e.performance


def test_1_how_many_bytes_is_a_tile_and_what_does_a_block_hold() -> None:
    # A tile of K: 128 rows x 128 columns x 2 bytes = 32,768. Q 1, K 2, V 2 of them, and 1,024 of barriers.
    assert HOPPER.B_c * HOPPER.d_head * 2 == 32768
    assert explain(HOPPER, PROMPT, H100).smem_bytes == 5 * 32768 + 1024


def test_2_how_many_products_has_the_steady_loop() -> None:
    # wgmma takes 16 of the reduction: 128 / 16 for Q K^T, 128 / 16 for P V.
    assert HOPPER.products_per_block == 8 + 8
    # mma.sync is 16 x 8 x 16. A warp's 16 rows: 64 / 8 columns x 128 / 16 steps, and 128 / 8 x 64 / 16.
    assert AMPERE.products_per_block == 8 * 8 + 16 * 4


def test_3_what_limits_this_kernel() -> None:
    found = of(explain(HOPPER, PROMPT, H100))
    # 4 x 16 x 16 x 4096^2 x 128 FLOP at 989 TFLOP/s.
    assert found.bounds.of("matrix") == pytest.approx(1e3 * 4 * 256 * 4096**2 * 128 / 989e12)
    assert [bound.name for bound in found.bounds.binding] == ["matrix"]
    # Shared memory: each of 2 warpgroups reads Q 16,384, K 32,768 and V 32,768 bytes; TMA writes K and V.
    # (2 x 81,920 + 65,536) / 128 = 1,792 clocks, where the products take 2,048 by the units' rates.
    assert found.costs.shared_memory == 1792
    assert found.costs.matrix == pytest.approx(2048, rel=0.001)


def test_4_why_is_the_unswizzled_kernel_slow() -> None:
    swizzled, plain = (of(explain(replace(AMPERE, swizzled=s), HALF, A100)) for s in (True, False))
    # 4 warps read 64 x 128 x 2 bytes of K and of V: 4 x 2 x 16,384 / 128 = 1,024 clocks; copies write 256.
    assert swizzled.costs.shared_memory == 1024 + 256
    # Rows of 128 bytes begin in one bank: ldmatrix takes eight times as long, cp.async does not.
    assert plain.costs.shared_memory == 8 * 1024 + 256
    assert plain.bounds.all[0].name == "shared memory"
    # 312 TFLOP/s were promised for both. 1,024 clocks of products: 1,024 / 8,448 of 312.
    e = explain(replace(AMPERE, swizzled=False), HALF, A100)
    assert e.attainable_tflops == pytest.approx(312 * 1024 / 8448, rel=0.01)
    ways = {access.name: access.ways for access in e.accesses}
    assert ways["K to registers, ldmatrix"] == ways["V to registers, ldmatrix.trans"] == 8


def test_5_what_do_spills_cost() -> None:
    # 500 four-byte accesses of a warp in the loop: 32 lanes x 4 bytes are one clock of shared memory each.
    compiled = Compiled(registers=255, spill_bytes=14000, instructions=1500, local_wavefronts=500)
    clean = replace(compiled, spill_bytes=0, local_wavefronts=0)
    spilled, without = (of(explain(AMPERE, HALF, A100, facts)) for facts in (compiled, clean))
    assert spilled.costs.spill == 4 * 500
    assert spilled.costs.shared_memory - without.costs.shared_memory == 4 * 500
    assert spilled.bounds.all[0].name == "shared memory"
    assert "2,000 of them for spilled registers" in spilled.bounds.all[0].how
    assert spilled.expected > 1.3 * without.expected


def test_6_how_many_blocks_run_on_an_sm() -> None:
    # 48 KiB + 1 KiB reserved of 164 KiB: 3. 168 registers x 32 lanes = 5,376 a warp, 3 warps in each quarter
    # of 16,384: 12 warps, 3 blocks. 169 are given out as 176: 2 warps a quarter, 2 blocks.
    for registers, blocks in ((168, 3), (169, 2)):
        found = of(explain(AMPERE, HALF, A100, Compiled(registers, 0)))
        assert found.occupancy.blocks == blocks
    assert of(explain(HOPPER, PROMPT, H100)).occupancy.blocks == 1


def test_7_what_would_one_more_stage_cost() -> None:
    more = replace(HOPPER, kv_stages=3)
    # One tile of K and one of V more; 230,400 of 232,448 bytes.
    taken = explain(more, PROMPT, H100).smem_bytes
    assert taken - explain(HOPPER, PROMPT, H100).smem_bytes == 2 * 32768
    assert (taken, H100.smem_per_block) == (230400, 232448)
    too_many = explain(replace(HOPPER, kv_stages=4), PROMPT, H100)
    assert too_many.infeasible is not None
    assert "295936 bytes of shared memory" in too_many.infeasible


def test_8_what_does_a_causal_mask_save() -> None:
    full, causal = (
        explain(HOPPER, replace(PROMPT, causal=mask), H100).work for mask in (False, True)
    )  # fmt: skip
    # 32 query blocks of a head see 1, 2, … 32 of 32 tiles: 528 of 1,024.
    assert full.steps == 256 * 32 * 32
    assert causal.steps == 256 * (1 + 32) * 32 // 2
    # Of the executed pairs, 4096 x 4097 / 2 of 528 x 128^2 are visible.
    assert causal.flop / causal.executed_flop == pytest.approx(4096 * 4097 / 2 / (528 * 128**2))


def test_9_what_does_a_window_leave() -> None:
    window = replace(attention_problem(PROMPT), left=256, right=0)
    found = explain(HOPPER, window, H100)
    assert found.kernel.traits.window
    # A block of 128 queries at p sees keys p - 256 … p + 127: 3 tiles; the first two blocks 1 and 2.
    assert found.work.steps == 256 * (1 + 2 + 30 * 3)


def test_10_why_is_one_query_slow_and_what_do_parts_change() -> None:
    problem = replace(attention_problem(Problem(DType.BF16, 1, 8, 1, 128, seq_len_k=16384)), cached=False)
    config = replace(HOPPER, B_r=64, ping_pong=False)
    whole, split = (of(explain(config, problem, H100, split=parts)) for parts in (False, True))
    # 8 blocks on 132 SMs: each goes through 128 tiles alone, one chain after the other.
    assert whole.waves.thread_blocks == 8
    assert whole.bounds.all[0].name in ("latency", "shared memory")
    assert whole.bounds.of("latency") == pytest.approx(1e3 * 128 * whole.costs.latency / 1.83e9)
    # Parts: as many blocks as fill the SMs; memory moves the same bytes.
    assert split.parts > 8
    assert split.waves.thread_blocks == 8 * split.parts
    assert split.expected < whole.expected / 3
    assert split.bounds.of("memory") == whole.bounds.of("memory")


def test_bounds_that_are_near_are_named_together() -> None:
    # d 256, 128 x 64: products 2 x 128 x 64 x 512 / 4,094 = 2,049 clocks; shared memory
    # (2 x (32,768 + 2 x 32,768) + 65,536) / 128 = 2,048.
    config = parse_kernel_name_into_config("(BF16, 256, 128, 64, 2wg): tma+kv_2+q_1+overlap+lagged+direct")
    found = of(explain(config, Problem(DType.BF16, 4, 8, 4096, 256), H100))
    assert {bound.name for bound in found.bounds.binding} >= {"matrix", "shared memory"}
    assert found.bounds.text().startswith("matrix; shared memory within 0 %")
