"""What the card's memory reaches in practice: the ceiling of work that only reads."""

from __future__ import annotations

import torch

from flash_helpers.benchmark.timers import timer_for
from flash_helpers.benchmark.timing import TimedCall, Timing, alternate

COPY_BYTES = 1 << 30


def copy_rate(device: torch.device, n_bytes: int = COPY_BYTES, rounds: int = 7) -> float:
    """Bytes that are read and written a second while a tensor is copied, median of ``rounds``."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    target, timer = torch.empty_like(source), timer_for(device)
    timed = TimedCall(lambda: target.copy_(source))
    timer.estimate(timed)
    samples, failures = alternate({"copy": timed}, timer.measure("kernel"), rounds)
    if failures:
        raise failures["copy"]
    return 2 * n_bytes / (Timing.of(samples["copy"]).median * 1e-3)
