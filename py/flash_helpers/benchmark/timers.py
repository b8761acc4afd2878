"""Which timer measures on which device."""

from __future__ import annotations

from typing import Any

from flash_helpers.benchmark.timing import CpuTimer, Timer


def timer_for(device: Any) -> Timer:
    """The timer of a ``torch.device``."""
    if device.type == "cuda":
        from flash_helpers.benchmark.cuda_timer import CudaTimer

        return CudaTimer(device)
    return CpuTimer()
