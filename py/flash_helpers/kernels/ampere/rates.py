"""What the instructions of the Ampere family take, in clocks and shares."""

from __future__ import annotations

# Of an H100, from dependent chains of one instruction each; an A100's differ by a few clocks.
MMA_CLOCKS = 33  # from operands to result of mma.sync.m16n8k16
LOAD_CLOCKS = 33  # ldmatrix, ld.shared
BARRIER_CLOCKS = 30

# What mma.sync reaches of the datasheet's matrix rate, by major compute capability. Hopper's full rate
# needs wgmma: mma.sync m16n8k16 was measured at 638 of 989 TFLOP/s with 16 warps an SM (H100, 2026-11).
MMA_SYNC_SHARE = {9: 638 / 989}
