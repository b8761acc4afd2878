"""What the card's matrix units reach in practice: the ceiling that rates are a percentage of."""

from __future__ import annotations

import torch

from flash_helpers.benchmark.timers import timer_for
from flash_helpers.benchmark.timing import TimedCall, Timer, Timing, alternate
from flash_helpers.kernels.dtype import DType

SIZE = {"cuda": 8192, "cpu": 512}  # rows, columns and reduction length of the product


def matrix_tflops(
    dtype: DType, device: torch.device, timer: Timer | None = None, rounds: int = 9, size: int = 0
) -> float:
    """Rate of a square ``torch.matmul``, 10^12 FLOP a second, median of ``rounds``."""
    size = size or SIZE.get(device.type, 512)
    a, b = (torch.randn(size, size, device=device, dtype=dtype.to_torch_dtype()) for _ in range(2))
    out = torch.empty_like(a)
    timer = timer or timer_for(device)
    timed = TimedCall(lambda: torch.matmul(a, b, out=out))
    timer.estimate(timed)
    samples, failures = alternate({"matmul": timed}, timer.measure("kernel"), rounds)
    if failures:
        raise failures["matmul"]
    return 2 * size**3 / Timing.of(samples["matmul"]).median / 1e9
