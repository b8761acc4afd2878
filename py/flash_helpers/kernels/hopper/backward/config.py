"""The backward pass of the Hopper family: what one of its kernels chooses."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.cpp_struct import designated_initializer
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.names import Name, size
from flash_helpers.kernels.traits import PLAIN_BACKWARD, BackwardTraits

MIN_CAPABILITY = (9, 0)


@dataclass(frozen=True, order=True)
class HopperBackwardKernelConfig:
    """Every choice of one backward kernel.

    The C++ struct of the same name is generated from this one.

    Attributes:
        dtype: element type of Q, K, V, O and their gradients.
        d_head: head size of Q and K, elements.
        d_head_v: head size of V and O.
        B_r: query rows of a tile.
        B_c: keys of a tile.
        n_warps: warps of a block.
    """

    dtype: DType = size()
    d_head: int = size()
    d_head_v: int = size(after="d_head")
    B_r: int = size()
    B_c: int = size()
    n_warps: int = size()

    deterministic = True
    products_per_block = 0

    @property
    def n_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.n_warps

    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """The kernel's id."""
        return NAME.write(self, include_d_head, include_tup)

    def to_cpp_struct(self) -> str:
        """The value as a C++ designated initializer."""
        return designated_initializer(self)

    def kernel_name(self) -> str:
        """The kernel's name as C++ writes it."""
        return f"flash::flash_backward_kernel<{self.to_cpp_struct()}>"

    def smem_bytes(self, elem_size: int = 2) -> int:
        """It takes no shared memory."""
        return 0

    def num_ctas_per_sm(self, max_smem_bytes: int) -> int:
        """Shared memory sets no limit."""
        return 2048 // self.n_threads

    def resident_registers(self) -> int:
        """The sums of dK and dV of a thread's key."""
        return self.d_head + self.d_head_v

    def attn_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """Five products: S, dP, dV, dK, dQ."""
        return 2 * batch * heads * seq_len * seq_len * (3 * self.d_head + 2 * self.d_head_v)

    def total_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """The same; nothing else counts."""
        return self.attn_flop(batch, heads, seq_len)

    def malformed_reason(self, traits: BackwardTraits = PLAIN_BACKWARD) -> str | None:
        """Why no GPU can run it, or None."""
        if not 1 <= self.n_warps <= 32:
            return f"n_warps is {self.n_warps}; it must be 1 to 32"
        return None

    def infeasible_reason(self, facts: DeviceFacts, traits: BackwardTraits = PLAIN_BACKWARD) -> str | None:
        """Why it cannot run on the device, or None."""
        if reason := self.malformed_reason(traits):
            return reason
        if facts.capability < MIN_CAPABILITY:
            return f"{facts.name} is older than {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
        return None


NAME = Name(
    HopperBackwardKernelConfig,
    "Hopper backward kernel",
    "(BF16, 128, 64, 64, 4): backward+tma",
    lead=("backward", "tma"),
)
