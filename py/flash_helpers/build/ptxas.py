"""Reading what ``ptxas -v`` says of a kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
# C75xx: ptxas had to give up an optimisation, such as overlapping asynchronous matrix products.
_WARNING = re.compile(r"\(C75\d\d\)|\bwarning\b", re.IGNORECASE)


@dataclass(frozen=True)
class PtxasReport:
    """Resources of one compiled unit; the largest figure where it holds several kernels.

    Attributes:
        registers: registers a thread.
        spill_bytes: stores and loads of spilled registers, bytes a thread.
        static_smem_bytes: statically allocated shared memory, bytes a block.
        warnings: lines that name a warning or a lost optimisation (C75xx).
    """

    registers: int
    spill_bytes: int
    static_smem_bytes: int
    warnings: tuple[str, ...]


def parse_ptxas(log: str) -> PtxasReport:
    """Reads the output of nvcc with ``-Xptxas -v``. Figures that it does not name are 0."""
    return PtxasReport(
        registers=max((int(n) for n in _REGISTERS.findall(log)), default=0),
        spill_bytes=max((int(stores) + int(loads) for stores, loads in _SPILLS.findall(log)), default=0),
        static_smem_bytes=max((int(n) for n in _STATIC_SMEM.findall(log)), default=0),
        warnings=tuple(line.strip() for line in log.splitlines() if _WARNING.search(line)),
    )
