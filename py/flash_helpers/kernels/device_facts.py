"""What a GPU offers a kernel: the figures that feasibility, prediction and selection need."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def target(self) -> int:
        """The compile target as one number: 80 for compute capability 8.0."""
        return self.capability[0] * 10 + self.capability[1]


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
