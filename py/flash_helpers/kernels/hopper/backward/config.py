"""The backward pass of the Hopper family: what one of its kernels chooses, and which choices go together."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.cpp_struct import designated_initializer
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.backward import resources
from flash_helpers.kernels.hopper.backward.resources import DqOutput
from flash_helpers.kernels.hopper.backward.rules import malformed_reason
from flash_helpers.kernels.hopper.family import HOPPER
from flash_helpers.kernels.names import Name, flag, number, one_of, size
from flash_helpers.kernels.traits import PLAIN_BACKWARD, BackwardTraits

MMA_K = 16  # reduction length of one wgmma


DQ_WORDS = {
    DqOutput.BULK_REDUCTION: "bulk",
    DqOutput.REGISTER_REDUCTION: "red",
    DqOutput.OWN_KERNEL: "own_dq",
    DqOutput.BLOCK_SUMS: "block_sums",
}


@dataclass(frozen=True, order=True)
class HopperBackwardKernelConfig:
    """Every choice of one backward kernel.

    The C++ struct of the same name is generated from this one.

    Attributes:
        dtype: element type of Q, K, V, O and their gradients.
        d_head: head size of Q and K, elements.
        d_head_v: head size of V and O.
        B_r: query rows of a step.
        B_c: keys of an item, which a block owns while it goes over all queries that see them.
        q_stages: slots of the rings of Q and of dO.
        k_stages: slots of K. Two let the next item's K arrive while this one's is in use.
        v_stages: slots of V.
        dq_output: see ``DqOutput``.
        late_dq: dQ of a query block is computed one step later, when the dS of both warpgroups has long been
            there: they need not wait for each other.
        ping_pong: the warpgroups take turns, so that one's exponentials meet the other's products.
        lse_ahead: the LSE of the next query block is read into registers while its scores are computed.
        float_p: dS is made of P in float32; else of P in FP16, for BF16 inputs times 2^12, beside P of dV.
            With a soft cap it is in float32 all the same: its product with the derivative of the cap takes
            the place of the scores.
        dynamic_schedule: blocks take items from a counter, longest first; else in static rounds.
        head_sections: under a mask heads are worked on in sections, so that short items fill the end of each.
        reversed_heads: from the last head to the first: what the kernel before has touched last is in the L2
            cache.
        trimmed: under a mask a warpgroup computes nothing of a query block that sees none of its keys; it
            takes part in dQ alone.
        split_gradients: one warpgroup computes S and dV, the other dP and dK, of 64 keys: head sizes whose dK
            and dV do not fit the registers of one.
        dq_B_c: keys of a step of dQ's own kernel; 0 where it has none.
    """

    dtype: DType = size()
    d_head: int = size()
    d_head_v: int = size(after="d_head")
    B_r: int = size()
    B_c: int = size()
    q_stages: int = number("q")
    k_stages: int = number("k")
    v_stages: int = number("v")
    dq_output: DqOutput = one_of(DQ_WORDS)
    late_dq: bool = flag("late")
    ping_pong: bool = flag("ping_pong")
    lse_ahead: bool = flag("lse_ahead")
    float_p: bool = flag("float_p")
    dynamic_schedule: bool = flag("dynamic")
    head_sections: bool = flag("sections")
    reversed_heads: bool = flag("reversed")
    trimmed: bool = flag("trimmed", False)
    split_gradients: bool = flag("split_gradients", False)
    dq_B_c: int = number("dq_keys", 0)

    # ------------------------------------------------------------------ names
    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """The kernel's id, e.g. ``(BF16, 128, 64, 128): backward+tma+q_2+k_2+v_1+bulk+late+ping_pong``."""
        return NAME.write(self, include_d_head, include_tup)

    def to_cpp_struct(self) -> str:
        """The value as a C++ designated initializer."""
        return designated_initializer(self)

    def kernel_name(self) -> str:
        """The name of the main kernel, that of dK and dV, as C++ writes it, without its traits."""
        return f"flash::hopper::hopper_backward_kernel<{self.to_cpp_struct()}>"

    # ------------------------------------------------------------------ resources
    @property
    def deterministic(self) -> bool:
        """Whether equal calls give equal bits: parts of dQ that are added come in any order."""
        return self.dq_output in (DqOutput.OWN_KERNEL, DqOutput.BLOCK_SUMS)

    @property
    def sums_dq(self) -> bool:
        """Whether the main kernel computes parts of dQ."""
        return self.dq_output != DqOutput.OWN_KERNEL

    @property
    def n_consumers(self) -> int:
        """Warpgroups of a block that compute."""
        return resources.CONSUMERS

    @property
    def n_threads(self) -> int:
        """Threads of a block: the producer warpgroup and the consumers."""
        return (1 + self.n_consumers) * resources.WARPGROUP_SIZE

    @property
    def n_warps(self) -> int:
        """Warps of a block."""
        return self.n_threads // 32

    def smem_bytes(self, elem_size: int = 2) -> int:
        """Shared memory of a block, the larger one of the two kernels; bytes."""
        own = resources.dq_smem_bytes(self, elem_size) if self.dq_output == DqOutput.OWN_KERNEL else 0
        return max(resources.smem_bytes(self, elem_size), own)

    def num_ctas_per_sm(self, max_smem_bytes: int) -> int:
        """Blocks an SM of ``max_smem_bytes`` bytes runs: one, if it fits; blocks take all registers."""
        return int(self.smem_bytes() <= max_smem_bytes)

    def resident_registers(self) -> int:
        """32-bit registers that a consumer thread holds where most are in use."""
        return resources.resident_registers(self)

    # ------------------------------------------------------------------ work
    @property
    def products_per_block(self) -> int:
        """Instructions ``wgmma`` in the loop of one warpgroup over the steps of the main kernel."""
        rows = self.d_head // MMA_K, self.d_head_v // MMA_K  # S, dP
        sums = self.B_r // MMA_K  # dV, dK, each
        if self.split_gradients:
            return max(rows) + sums
        dq = self.B_c // MMA_K if self.sums_dq else 0
        hidden = rows[0] + dq if self.trimmed else 0  # the step of a block that a warpgroup does not see
        return sum(rows) + 2 * sums + dq + hidden

    def attn_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """FLOP of the five matrix products S, dP, dV, dK, dQ, every key visible.

        2 · batch · heads · seq_len² · (3 · d_head + 2 · d_head_v), also where S and dP are computed twice.
        """
        return 2 * batch * heads * seq_len * seq_len * (3 * self.d_head + 2 * self.d_head_v)

    def total_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """``attn_flop`` and 6 for each score: scale, subtraction, exponential, dP - delta, product, round."""
        return self.attn_flop(batch, heads, seq_len) + 6 * batch * heads * seq_len * seq_len

    # ------------------------------------------------------------------ feasibility
    def malformed_reason(self, traits: BackwardTraits = PLAIN_BACKWARD) -> str | None:
        """Why no GPU can run this configuration compiled for some traits, or None.

        C++ refuses the same by ``static_assert``, but for the registers, which ptxas would spill.
        """
        return malformed_reason(self, traits)

    def infeasible_reason(self, facts: DeviceFacts, traits: BackwardTraits = PLAIN_BACKWARD) -> str | None:
        """Why this configuration, compiled for some traits, cannot run on the device, or None."""
        return (
            self.malformed_reason(traits)
            or HOPPER.unable_reason(facts)
            or facts.smem_obstacle(self.smem_bytes())
        )


NAME = Name(
    HopperBackwardKernelConfig,
    "Hopper backward kernel",
    "(BF16, 128, 64, 128): backward+tma+q_2+k_2+v_1+bulk+late+ping_pong+lse_ahead+dynamic",
    lead=("backward", "tma"),
)
