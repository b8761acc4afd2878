"""What a GPU offers a kernel: the figures that feasibility, prediction and selection need."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of one GPU model, from NVIDIA's CUDA programming guide (compute capabilities table).

    Attributes:
        name: the product's name as the driver reports it.
        capability: compute capability, (major, minor).
        sm_count: streaming multiprocessors.
        smem_per_sm: shared memory of one SM, bytes.
        smem_per_block: the most dynamic shared memory one block may ask for, bytes.
        l2_bytes: size of the L2 cache, bytes.
        registers_per_sm: 32-bit registers of one SM.
        threads_per_sm: the most resident threads of one SM.
        blocks_per_sm: the most resident blocks of one SM.
        smem_reserved_per_block: shared memory the driver takes for itself in each block, bytes.
        dram_bandwidth: memory bandwidth by the datasheet, bytes a second.
        mma_flops: dense fp16/bf16 matrix rate with fp32 accumulation by the datasheet, FLOP a second.
        clock_hz: boost clock the datasheet's rates refer to, Hz.

    The last three may be 0, which means unknown.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a number that no GPU has.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_sm: int
    smem_per_block: int
    l2_bytes: int
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    smem_reserved_per_block: int = 1024
    dram_bandwidth: float = 0.0
    mma_flops: float = 0.0
    clock_hz: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"DeviceFacts.name is {self.name!r}; it must be a text: the product's name")
        _check_capability(self.capability)
        for f in fields(self)[2:]:
            value, rate = getattr(self, f.name), f.name in RATES
            kind, wanted = (numbers.Real, "a number") if rate else (numbers.Integral, "a whole number")
            least = "0 (unknown) or more" if rate else "0 or more" if f.name in MAY_BE_NONE else "1 or more"
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"DeviceFacts.{f.name} is {value!r}; it must be {wanted}, {least}")
            if not math.isfinite(value) or value < (0 if rate or f.name in MAY_BE_NONE else 1):
                raise ValueError(f"DeviceFacts.{f.name} is {value!r}; it must be {wanted}, {least}")

    @property
    def target(self) -> int:
        """The compile target as one number: 80 for compute capability 8.0."""
        return self.capability[0] * 10 + self.capability[1]

    def smem_obstacle(self, n_bytes: int, what: str = "a block") -> str | None:
        """Why no block may have so many bytes of shared memory, or None."""
        if n_bytes <= self.smem_per_block:
            return None
        return f"{what} needs {n_bytes} bytes of shared memory; {self.name} allows {self.smem_per_block}"

    def limited_to(self, n_sms: int) -> DeviceFacts:
        """The device as a call sees it that may use so many SMs, fewer than there are; memory is as fast."""
        return replace(self, sm_count=n_sms, mma_flops=self.mma_flops * n_sms / self.sm_count)


RATES = ("dram_bandwidth", "mma_flops", "clock_hz")
MAY_BE_NONE = ("l2_bytes", "smem_reserved_per_block")


def _check_capability(capability: object) -> None:
    parts = capability if isinstance(capability, tuple) and len(capability) == 2 else ("", "")
    if not all(type(part) is int and part >= 0 for part in parts):
        raise TypeError(
            f"DeviceFacts.capability is {capability!r}; it must be the compute capability as a pair of whole "
            "numbers, such as (9, 0)"
        )


KIB = 1024
MIB = 1024 * KIB

KNOWN_DEVICES: dict[str, DeviceFacts] = {
    "A100": DeviceFacts(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 164 * KIB, 163 * KIB, 40 * MIB,
        dram_bandwidth=2.039e12, mma_flops=312e12, clock_hz=1.41e9,
    ),
    "RTX3090": DeviceFacts(
        "NVIDIA GeForce RTX 3090", (8, 6), 82, 100 * KIB, 99 * KIB, 6 * MIB,
        threads_per_sm=1536, blocks_per_sm=16,
        dram_bandwidth=0.936e12, mma_flops=71e12, clock_hz=1.695e9,
    ),
    "RTX4090": DeviceFacts(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 100 * KIB, 99 * KIB, 72 * MIB,
        threads_per_sm=1536, blocks_per_sm=24,
        dram_bandwidth=1.008e12, mma_flops=165.2e12, clock_hz=2.52e9,
    ),
    "H100": DeviceFacts(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 228 * KIB, 227 * KIB, 50 * MIB,
        dram_bandwidth=3.35e12, mma_flops=989e12, clock_hz=1.83e9,
    ),
    "H200": DeviceFacts(
        "NVIDIA H200", (9, 0), 132, 228 * KIB, 227 * KIB, 60 * MIB,
        dram_bandwidth=4.8e12, mma_flops=989e12, clock_hz=1.83e9,
    ),
}  # fmt: skip
"""GPU models that predictions can be asked for without having one."""


def device_facts(name: str) -> DeviceFacts:
    """The facts of a known GPU model by a short name in any case, e.g. ``h100``, ``RTX 4090``.

    Raises:
        TypeError: not a text.
        ValueError: no such model; the message lists the known ones.
    """
    if not isinstance(name, str):
        raise TypeError(f"a device's name is {name!r}; it must be one of {', '.join(KNOWN_DEVICES)}")
    key = name.upper().replace(" ", "").replace("-", "").replace("_", "")
    if key in KNOWN_DEVICES:
        return KNOWN_DEVICES[key]
    raise ValueError(f"unknown device {name!r}; known: {', '.join(KNOWN_DEVICES)}")
