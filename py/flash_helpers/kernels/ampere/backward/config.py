"""The backward pass of the Ampere family: kernels built on ``mma.sync``, ``ldmatrix`` and ``cp.async``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from flash_helpers.kernels.ampere.family import AMPERE
from flash_helpers.kernels.cpp_struct import designated_initializer
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.names import Name, flag, number, one_of, size
from flash_helpers.kernels.traits import PLAIN_BACKWARD, BackwardTraits

MMA_M = 16  # rows of one mma.sync.m16n8k16 product
MMA_N = 8  # columns of one product
MMA_K = 16  # reduction length of one product
WARP_SIZE = 32
PANEL_COLUMNS = 64  # elements of a 128-byte row, the width of a tile in shared memory
SUM_ROWS = 128  # rows of the float32 sums that a tile of queries must divide
MAX_STAGES = 3
MAX_REGISTERS = 255
ROLES = 2  # score warps, gradient warps
DQ_ROWS = 32  # of dQ that a warp makes


class DQSum(IntEnum):
    """How dQ, of which every block of keys makes a part, is summed.

    Attributes:
        ATOMIC: in float32 in global memory, in whatever order the blocks come: the last bits differ from run
            to run.
        ORDERED: likewise, one block of keys after the other; whoever comes early waits. The first writes, so
            that nothing is cleared, the last leaves dQ itself. Equal bits in each run.
        OWN_KERNEL: a second kernel makes dQ by itself, a block of queries at a time in registers: two
            products more, no sums in global memory, equal bits in each run.
    """

    ATOMIC = 0
    ORDERED = 1
    OWN_KERNEL = 2

    def to_cpp_str(self) -> str:
        """The enumerator as C++ source text."""
        return f"DQSum::{self.name}"


class DQWarps(IntEnum):
    """Which half of the warps makes the dQ of a tile of queries.

    Attributes:
        GRADIENT: the gradient warps, behind dK.
        SCORE: the score warps, behind the dV of the next tile.
        BOTH: all of them, each one half of the columns.
        ALTERNATE: the score warps of the first tile, the gradient warps of the second, and so on: both halves
            have equal work, and a warp's part of dQ is as large as where one half makes all.
    """

    GRADIENT = 0
    SCORE = 1
    BOTH = 2
    ALTERNATE = 3

    def to_cpp_str(self) -> str:
        """The enumerator as C++ source text."""
        return f"DQWarps::{self.name}"


DQ_SUM_WORDS = {DQSum.ATOMIC: "atomic", DQSum.ORDERED: "ordered", DQSum.OWN_KERNEL: "own_kernel"}
DQ_WARPS_WORDS = {
    DQWarps.GRADIENT: "dq_gradient_warps",
    DQWarps.SCORE: "dq_score_warps",
    DQWarps.BOTH: "dq_all_warps",
    DQWarps.ALTERNATE: "dq_alternate",
}


@dataclass(frozen=True, order=True)
class FlashBackwardKernelConfig:
    """Every choice one Ampere-class backward kernel makes.

    A thread block owns ``B_c`` keys of one head of K and V and walks over tiles of ``B_r`` queries. Half of
    its warps, the score warps, make P and hold dV; the other half, the gradient warps, make dS and hold dK.

    The C++ struct of the same name is generated from this one.

    Attributes:
        dtype: element type of Q, K, V, O and their gradients.
        d_head: head size of Q and K, elements.
        d_head_v: head size of V and O.
        B_r: queries of a tile.
        B_c: keys of a block.
        n_warps: warps of a block, of both halves.
        swizzled: shared memory is XOR-swizzled, so that ``ldmatrix`` and the copies have no bank conflicts.
        stages: tiles of Q and of dO that shared memory holds; from 2 on the next are under way while one is
            used.
        ds_slots: tiles of dS that shared memory holds; with 2 the next is written while dQ is made of one.
        paired_warps: two warps of a half share their keys, and halve the queries of a tile and the columns of
            dV or dK: room for large heads.
        holds_K: the score warps' part of K stays in registers.
        holds_V: the gradient warps' part of V stays in registers.
        dq_warps: see ``DQWarps``; of no meaning with ``OWN_KERNEL``.
        dq_sum: see ``DQSum``.
        dq_B_r: queries of a block of the kernel that makes dQ by itself; 0 where there is none.
        dq_B_c: keys that it takes a step.
        dq_n_warps: its warps; each owns ``dq_B_r / dq_n_warps`` queries.
    """

    dtype: DType = size()
    d_head: int = size()
    d_head_v: int = size(after="d_head")
    B_r: int = size()
    B_c: int = size()
    n_warps: int = size()
    swizzled: bool = flag("swizzled")
    stages: int = number("stages", 1)
    ds_slots: int = number("ds_slots", 1)
    paired_warps: bool = flag("paired_warps", False)
    holds_K: bool = flag("holds_K", False)
    holds_V: bool = flag("holds_V", False)
    dq_warps: DQWarps = one_of(DQ_WARPS_WORDS, DQWarps.GRADIENT)
    dq_sum: DQSum = one_of(DQ_SUM_WORDS, DQSum.ATOMIC)
    dq_B_r: int = number("dq_B_r", 0)
    dq_B_c: int = number("dq_B_c", 0)
    dq_n_warps: int = number("dq_n_warps", 0)

    # ------------------------------------------------------------------ names
    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """The kernel's id, for example ``(BF16, 128, 64, 128, 8): backward+swizzled+stages_2+ds_slots_2``."""
        return NAME.write(self, include_d_head, include_tup)

    def kernel_name(self) -> str:
        """The C++ kernel that this value instantiates, as a demangler prints its template name."""
        return f"flash::flash_backward_kernel<{self.to_cpp_struct()}>"

    def to_cpp_struct(self) -> str:
        """The value as a C++ designated initializer."""
        return designated_initializer(self)

    # ------------------------------------------------------------------ resources
    @property
    def deterministic(self) -> bool:
        """Whether equal calls give equal bits."""
        return self.dq_sum != DQSum.ATOMIC

    @property
    def n_threads(self) -> int:
        """Threads of a block."""
        return WARP_SIZE * self.n_warps

    @property
    def role_warps(self) -> int:
        """Score warps of a block; gradient warps, too."""
        return self.n_warps // ROLES

    @property
    def warps_per_group(self) -> int:
        """Warps of a half that share their keys."""
        return 2 if self.paired_warps else 1

    @property
    def keys_per_warp(self) -> int:
        """Keys one warp owns, alone or with the other of its pair."""
        return self.B_c * self.warps_per_group // self.role_warps

    @property
    def has_dq_kernel(self) -> bool:
        """Whether a second kernel makes dQ."""
        return self.dq_sum == DQSum.OWN_KERNEL

    @property
    def dq_tile_warps(self) -> int:
        """Warps that make one tile of dQ together."""
        return self.n_warps if self.dq_warps == DQWarps.BOTH else self.role_warps

    def smem_bytes(self, elem_size: int = 2) -> int:
        """Shared memory of a block of the kernel that makes dK and dV; bytes."""
        return self.smem_bytes_for(PLAIN_BACKWARD)

    def smem_bytes_for(self, traits: BackwardTraits) -> int:
        """The same for some traits: pairs have P in two forms, but for FP16 without a soft cap."""
        columns = _whole_panels(self.d_head) + _whole_panels(self.d_head_v)
        scores = 2 * self.B_c * _whole_panels(self.B_r)  # a tile of P, or of dS
        handed_apart = self.dtype == DType.BF16 or traits.softcap
        P_tiles = 2 if self.paired_warps and handed_apart else 1
        dS_tiles = self.ds_slots if self.paired_warps or not self.has_dq_kernel else 0
        numbers = self.stages * 2 * 4 * self.B_r  # LSE and delta
        barriers = 8 * (2 + 4 * self.stages + 2 * self.role_warps + 2 * self.ds_slots)
        tiles = 2 * columns * (self.B_c + self.stages * self.B_r)
        return tiles + (P_tiles + dS_tiles) * scores + numbers + barriers

    def dq_smem_bytes(self) -> int:
        """Shared memory of a block of the kernel that makes dQ; 0 where there is none."""
        if not self.has_dq_kernel:
            return 0
        columns = _whole_panels(self.d_head) + _whole_panels(self.d_head_v)
        return (
            2 * columns * (self.dq_B_r + self.stages * self.dq_B_c)
            + 8 * self.dq_B_r
            + 8 * (1 + 4 * self.stages)
        )

    def num_ctas_per_sm(self, max_smem_bytes: int) -> int:
        """Blocks that fit one SM's shared memory of ``max_smem_bytes`` bytes."""
        return max_smem_bytes // self.smem_bytes()

    def resident_registers(self) -> int:
        """32-bit registers a thread holds at the fullest place of the main loop.

        dV and S of a score warp, or dK and dP of a gradient warp, and K or V if they are held; or dV or dK
        and a part of dQ. Fragments, addresses and temporaries come on top.
        """
        keys, share = self.keys_per_warp, self.warps_per_group
        queries = self.B_r // share
        scores = keys * queries // WARP_SIZE
        dV, dK = keys * self.d_head_v // share // WARP_SIZE, keys * self.d_head // share // WARP_SIZE
        held_K = keys * self.d_head // (2 * WARP_SIZE) if self.holds_K else 0
        held_V = keys * self.d_head_v // (2 * WARP_SIZE) if self.holds_V else 0
        dQ = 0 if self.has_dq_kernel else self.B_r * self.d_head // self.dq_tile_warps // WARP_SIZE
        with_scores, with_gradients = dV + held_K, dK + held_V
        if self.dq_warps == DQWarps.GRADIENT:
            return max(with_scores + scores, with_gradients + max(scores, dQ))
        if self.dq_warps == DQWarps.SCORE:
            return max(with_scores + max(scores, dQ), with_gradients + scores)
        return max(with_scores, with_gradients) + max(scores, dQ)

    def dq_resident_registers(self) -> int:
        """The same of the kernel that makes dQ: dQ, P in 16 bits and dP."""
        if not self.has_dq_kernel:
            return 0
        rows = self.dq_B_r // self.dq_n_warps
        return rows * self.d_head // WARP_SIZE + rows * self.dq_B_c * 3 // (2 * WARP_SIZE)

    # ------------------------------------------------------------------ work
    def attn_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """FLOP of the five products that a backward pass needs, every key visible: S, dP, dV, dK, dQ."""
        return 2 * batch * heads * seq_len * seq_len * (3 * self.d_head + 2 * self.d_head_v)

    def total_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """``attn_flop``, S and dP once more where dQ has a kernel, and 5 for each score.

        These are a multiply-add, an exponential, a difference and a product.
        """
        again = 2 * (self.d_head + self.d_head_v) if self.has_dq_kernel else 0
        scores = batch * heads * seq_len * seq_len
        return self.attn_flop(batch, heads, seq_len) + scores * (again + 5)

    @property
    def products_per_block(self) -> int:
        """Instructions ``mma.sync`` of the loop of a score warp: S, dV and, where it makes that, dQ."""
        row_tiles, share = self.keys_per_warp // MMA_M, self.warps_per_group
        S = row_tiles * (self.B_r // share // MMA_N) * (self.d_head // MMA_K)
        dV = row_tiles * (self.B_r // MMA_K) * (self.d_head_v // share // MMA_N)
        if self.has_dq_kernel or self.dq_warps == DQWarps.GRADIENT:
            return S + dV
        part = self.B_r * self.d_head // self.dq_tile_warps // (MMA_M * MMA_N)
        return S + dV + part * (self.B_c // MMA_K)

    # ------------------------------------------------------------------ feasibility
    def malformed_reason(self, traits: BackwardTraits = PLAIN_BACKWARD) -> str | None:
        """Why no GPU can run this configuration compiled for some traits, or None.

        C++ refuses the same by ``static_assert``.
        """
        return (
            self._malformed_sizes()
            or self._malformed_warps()
            or self._malformed_sums()
            or traits.float_obstacle()
        )

    def _malformed_sizes(self) -> str | None:
        for name in ("d_head", "d_head_v"):
            value = getattr(self, name)
            if value <= 0 or value % PANEL_COLUMNS or value > 256:
                return f"{name} is {value}; this family has 64, 128, 192 and 256"
        if self.B_r not in (64, 128):
            return f"B_r is {self.B_r}; it must be 64 or 128: rows of dS are panels of 64 queries"
        if self.n_warps not in (4, 8, 12, 16):
            return (
                f"n_warps is {self.n_warps}; it must be 4, 8, 12 or 16, of which either half has two or more"
            )
        if not 1 <= self.stages <= MAX_STAGES:
            return f"stages is {self.stages}; it must be 1 to {MAX_STAGES}"
        if self.ds_slots not in (1, 2):
            return f"ds_slots is {self.ds_slots}; it must be 1 or 2"
        return None

    def _malformed_warps(self) -> str | None:
        pairs = "pairs of warps" if self.paired_warps else "warps"
        if self.role_warps % self.warps_per_group:
            return f"n_warps is {self.n_warps} with paired_warps: either half needs an even number of warps"
        step = MMA_M * self.role_warps // self.warps_per_group
        rows_per_pass = self.role_warps * WARP_SIZE * 8 // PANEL_COLUMNS
        if self.B_c <= 0 or self.B_c % step or self.B_c % rows_per_pass:
            return (
                f"B_c is {self.B_c} with {self.n_warps} warps: the {pairs} of either half own a multiple of "
                f"{MMA_M} keys each and copy {rows_per_pass} rows at a time, so B_c must be a multiple of "
                f"{step} and of {rows_per_pass}"
            )
        if self.B_r % rows_per_pass or rows_per_pass % 8 or self.role_warps * WARP_SIZE < self.B_r:
            return (
                f"B_r is {self.B_r} with {self.n_warps} warps: one half copies a tile, {rows_per_pass} rows "
                "at a time, and the LSE of each row by one thread; take B_r a multiple of that and no more "
                f"than {self.role_warps * WARP_SIZE}, and n_warps a multiple of 4"
            )
        if self.paired_warps and (self.d_head % (2 * PANEL_COLUMNS) or self.d_head_v % (2 * PANEL_COLUMNS)):
            return (
                f"paired_warps with head sizes {self.d_head} and {self.d_head_v}: a pair halves both, so "
                f"they must be multiples of {2 * PANEL_COLUMNS}"
            )
        return None

    def _malformed_sums(self) -> str | None:
        own = (self.dq_B_r, self.dq_B_c, self.dq_n_warps)
        if not self.has_dq_kernel:
            if any(own):
                return (
                    f"dq_B_r, dq_B_c and dq_n_warps are {own}: they are of the kernel that makes dQ by "
                    "itself; make them 0, or dq_sum OWN_KERNEL"
                )
            return self._malformed_dq_part()
        if self.dq_n_warps not in (2, 4, 8, 16):
            return f"dq_n_warps is {self.dq_n_warps}; it must be 2, 4, 8 or 16"
        rows_per_pass = self.dq_n_warps * WARP_SIZE * 8 // PANEL_COLUMNS
        if self.dq_B_r <= 0 or self.dq_B_r % (MMA_M * self.dq_n_warps):
            return (
                f"dq_B_r is {self.dq_B_r} with {self.dq_n_warps} warps: each owns a multiple of {MMA_M} "
                f"queries, so it must be a multiple of {MMA_M * self.dq_n_warps}"
            )
        if self.dq_B_c <= 0 or self.dq_B_c % MMA_K or self.dq_B_c % rows_per_pass:
            return (
                f"dq_B_c is {self.dq_B_c} with {self.dq_n_warps} warps, which copy {rows_per_pass} rows at a "
                f"time: it must be a multiple of that and of {MMA_K}"
            )
        return None

    def _malformed_dq_part(self) -> str | None:
        warps, row_warps = self.dq_tile_warps, self.B_r // DQ_ROWS
        columns = warps // row_warps
        if warps % row_warps or columns not in (1, 2, 4) or self.d_head % (columns * MMA_K):
            return (
                f"dq_warps {self.dq_warps.name} with {self.n_warps} warps and B_r {self.B_r}: {warps} warps "
                f"make a tile of dQ, {DQ_ROWS} rows each, so {row_warps} of them share its rows, and 1, 2 or "
                "4 must share its columns"
            )
        if self.dq_sum == DQSum.ORDERED and self.d_head // columns % 32:
            return (
                f"dq_sum ORDERED with dq_warps {self.dq_warps.name}: {columns} warps share the {self.d_head} "
                "columns of dQ and store their parts, multiples of 32 columns; choose ATOMIC or fewer warps"
            )
        return None

    def infeasible_reason(self, facts: DeviceFacts, traits: BackwardTraits = PLAIN_BACKWARD) -> str | None:
        """Why this configuration, compiled for some traits, cannot run on the device, or None.

        Args:
            facts: the device, see ``flash_helpers.kernels.device_facts``.
            traits: what the kernel is compiled for.
        """
        if reason := (
            self.malformed_reason(traits)
            or AMPERE.unable_reason(facts)
            or facts.smem_obstacle(self.smem_bytes_for(traits))
            or facts.smem_obstacle(self.dq_smem_bytes(), "a block of the kernel that makes dQ")
        ):
            return reason
        for what, held in (
            ("the sums", self.resident_registers()),
            ("the sums of the kernel that makes dQ", self.dq_resident_registers()),
        ):
            if held >= MAX_REGISTERS:
                return f"{what} take {held} registers of a thread, which has {MAX_REGISTERS}"
        return None


def _whole_panels(columns: int) -> int:
    """Columns of a tile in shared memory."""
    return -(-columns // PANEL_COLUMNS) * PANEL_COLUMNS


NAME = Name(
    FlashBackwardKernelConfig,
    "Ampere backward kernel",
    "(BF16, 128, 64, 128, 8): backward+swizzled+stages_2+ds_slots_2+dq_alternate",
    lead=("backward",),
)
