"""The Hopper family: kernels built on TMA, ``mbarrier`` and ``wgmma`` (sm_90a only)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from flash_helpers.kernels.cpp_struct import designated_initializer
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.softmax import SOFTMAX_WORDS, SoftmaxReference

CAPABILITY = (9, 0)
WARPGROUP_SIZE = 128  # threads
WARPGROUP_ROWS = 64  # query rows of one wgmma
MMA_K = 16  # reduction length of one wgmma
PANEL_COLUMNS = 64  # elements of a 128-byte row, the widest that TMA swizzles
CONTROL_BYTES = 1024  # barriers and work items
MAX_PREFETCH = 16  # prefetch_next
D_HEADS = (64, 96, 128, 192, 256)
PRODUCT_WIDTHS = (
    48,
    64,
    80,
    96,
    112,
    128,
    144,
    160,
    176,
    192,
    256,
)  # of wgmma, in src/include/hopper/wgmma.cuh

REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
"""Registers a thread by number of consumer warpgroups: (producer, consumer). ``register_budget`` in C++."""

REGISTER_OVERHEAD = {1: 24, 2: 24, 3: 28, 4: 28}
"""Registers a consumer needs beside accumulators and P: found by compiling, the first that does not spill."""


class NextItem(IntEnum):
    """Where the next work item's first product starts.

    Attributes:
        NONE: after this item is stored.
        WITH_LAST_PV: together with this item's last P V.
        AFTER_LAST_PV: after the last P V, under the normalisation and store of O.
    """

    NONE = 0
    WITH_LAST_PV = 1
    AFTER_LAST_PV = 2

    def to_cpp_str(self) -> str:
        """The enumerator as C++ source text."""
        return f"NextItem::{self.name}"


NEXT_ITEM_WORDS = {
    NextItem.NONE: "",
    NextItem.WITH_LAST_PV: "next_with_pv",
    NextItem.AFTER_LAST_PV: "next_after_pv",
}
FLAG_WORDS = {
    "overlap_products": "overlap",
    "ping_pong": "ping_pong",
    "forced_overlap": "forced_overlap",
    "direct_store": "direct",
    "dynamic_schedule": "dynamic",
    "head_sections": "sections",
    "early_pass": "early_pass",
    "trimmed": "trimmed",
    "paired_blocks": "paired",
    "half_tiles": "half_tiles",
}
NUMBER_WORDS = {
    "section_heads": "heads",
    "prefetch_next": "prefetch",
    "extra_k_stages": "more_k",
    "q_register_steps": "q_regs",
}
"""The words of ``short_form()``, shared with the parser; ``heads_8``: a number of ``NUMBER_WORDS``, not 0."""


@dataclass(frozen=True, order=True)
class HopperForwardKernelConfig:
    """Every choice one Hopper-class forward kernel makes.

    The C++ struct of the same name has the same fields in the same order.

    Attributes:
        dtype: element type of Q, K, V and O.
        d_head: head size of Q and K, elements.
        d_head_v: head size of V and O, elements.
        B_r: query rows one thread block works on at a time, 64 a consumer warpgroup.
        B_c: key and value rows a block takes per step.
        kv_stages: slots of the K ring and of the V ring.
        q_stages: Q slots. Two let the next item's Q arrive while O of this one leaves.
        overlap_products: Q K^T of a tile runs together with P V of the one before, softmax under both.
        ping_pong: warpgroups take turns to issue products, so that one's softmax meets another's products.
        softmax_reference: see ``SoftmaxReference``.
        forced_overlap: a branch keeps the compiler from waiting for P V before the exponentials.
        next_item: see ``NextItem``.
        direct_store: O goes from registers to global memory, else by TMA through its Q slot.
        dynamic_schedule: blocks take items from a counter, longest first; else in static rounds.
        head_sections: heads are worked on in sections whose K and V stay in the L2 cache; else one by one.
        early_pass: the turn goes on half way through P V instead of after it.
        trimmed: under a causal mask each warpgroup skips all tiles above its own diagonal, not only (three
            warpgroups) the first.
        paired_blocks: two blocks on neighbouring SMs take neighbouring query blocks, and each loads half of
            every K and V tile for both; under a causal mask the lower one passes on the tiles above its
            diagonal. Not where sequences differ in length, keys are split or a window hides some, nor under a
            causal mask with next_item unless kv_stages are more than the tiles that are passed on.
        half_tiles: under a causal mask, the scores of an item's first tile are computed for half of its
            columns where a warpgroup sees no other.
        section_heads: heads of a section at most; 0: by the length, see ``work_items.cuh``.
        prefetch_next: while an item runs, the next one's Q and ``prefetch_next - 1`` tiles of its K and V are
            brought into the L2 cache; 0: nothing is. Not where sequences differ in length, or keys are split.
        extra_k_stages: slots of the K ring beyond those of V's. K's are held longer, by the lagged reference.
        q_register_steps: of the d_head / 16 steps of Q K^T, how many (the last) take Q from registers: a
            product of 64 rows and 64 columns from shared memory alone needs all of its bandwidth.
    """

    dtype: DType
    d_head: int
    d_head_v: int
    B_r: int
    B_c: int
    kv_stages: int
    q_stages: int
    overlap_products: bool
    ping_pong: bool
    softmax_reference: SoftmaxReference
    forced_overlap: bool
    next_item: NextItem
    direct_store: bool
    dynamic_schedule: bool
    head_sections: bool
    early_pass: bool = False
    trimmed: bool = False
    paired_blocks: bool = False
    half_tiles: bool = False
    section_heads: int = 0
    prefetch_next: int = 0
    extra_k_stages: int = 0
    q_register_steps: int = 0

    # ------------------------------------------------------------------ names
    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """The kernel's id, e.g. ``(BF16, 128, 128, 128, 2wg): tma+kv_2+q_2+overlap+ping_pong+lagged``.

        Args:
            include_d_head: show ``d_head`` (``d_head/d_head_v`` where they differ) in the tuple.
            include_tup: show the tuple ``(dtype, d_head, B_r, B_c, consumer warpgroups)`` at all.
        """
        words = [
            "tma",
            f"kv_{self.kv_stages}",
            f"q_{self.q_stages}",
            FLAG_WORDS["overlap_products"] if self.overlap_products else "",
            FLAG_WORDS["ping_pong"] if self.ping_pong else "",
            SOFTMAX_WORDS[self.softmax_reference],
            FLAG_WORDS["forced_overlap"] if self.forced_overlap else "",
            NEXT_ITEM_WORDS[self.next_item],
            FLAG_WORDS["direct_store"] if self.direct_store else "",
            FLAG_WORDS["dynamic_schedule"] if self.dynamic_schedule else "",
            FLAG_WORDS["head_sections"] if self.head_sections else "",
            FLAG_WORDS["early_pass"] if self.early_pass else "",
            FLAG_WORDS["trimmed"] if self.trimmed else "",
            FLAG_WORDS["paired_blocks"] if self.paired_blocks else "",
            FLAG_WORDS["half_tiles"] if self.half_tiles else "",
            *(f"{word}_{getattr(self, name)}" for name, word in NUMBER_WORDS.items() if getattr(self, name)),
        ]
        text = "+".join(word for word in words if word)
        if not include_tup:
            return text
        d_head = str(self.d_head) if self.d_head == self.d_head_v else f"{self.d_head}/{self.d_head_v}"
        d_head = f"{d_head}, " if include_d_head else ""
        return f"({self.dtype.name}, {d_head}{self.B_r}, {self.B_c}, {self.n_consumers}wg): {text}"

    def to_cpp_struct(self) -> str:
        """The value as a C++ designated initializer."""
        return designated_initializer(self)

    def kernel_name(self) -> str:
        """The kernel's name as C++ writes it, without its traits."""
        return f"flash::hopper::hopper_forward_kernel<{self.to_cpp_struct()}>"

    # ------------------------------------------------------------------ resources
    @property
    def n_consumers(self) -> int:
        """Consumer warpgroups of a block."""
        return self.B_r // WARPGROUP_ROWS

    @property
    def n_threads(self) -> int:
        """Threads of a block: the producer warpgroup and the consumers."""
        return (1 + self.n_consumers) * WARPGROUP_SIZE

    @property
    def n_warps(self) -> int:
        """Warps of a block."""
        return self.n_threads // 32

    @property
    def optimized_softmax(self) -> bool:
        """Scale and log2(e) are always folded into one fused multiply-add before exp2."""
        return True

    @property
    def writes_lse(self) -> bool:
        """Whether the kernel can write the log-sum-exp of each row: all of this family can."""
        return True

    def smem_bytes(self, elem_size: int = 2) -> int:
        """Shared memory of a block: Q slots, K and V rings (columns padded to 64), barriers; bytes."""
        q = self.q_stages * self.B_r * _padded(self.d_head)
        k = (self.kv_stages + self.extra_k_stages) * self.B_c * _padded(self.d_head)
        v = self.kv_stages * self.B_c * _padded(self.d_head_v)
        return (q + k + v) * elem_size + CONTROL_BYTES

    def num_ctas_per_sm(self, max_smem_bytes: int) -> int:
        """Blocks an SM of ``max_smem_bytes`` bytes runs: one, if it fits; blocks take all registers."""
        return int(self.smem_bytes() <= max_smem_bytes)

    def resident_registers(self) -> int:
        """32-bit registers a consumer thread holds through the main loop.

        S and O in float32, the part of Q kept there, and, where products overlap, P of the tile before: P V
        reads it while the next S is computed.
        """
        accumulators = (self.B_c + self.d_head_v) // 2
        q = 4 * self.q_register_steps
        return accumulators + q + (self.B_c // 4 if self.overlap_products else 0)

    # ------------------------------------------------------------------ work
    def attn_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """FLOP of the two matrix products, every key visible.

        2 · batch · heads · seq_len² · (d_head + d_head_v).
        """
        return 2 * batch * heads * seq_len * seq_len * (self.d_head + self.d_head_v)

    def total_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """``attn_flop`` plus the softmax work of this tiling, counted as the Ampere family counts it.

        A score costs 5 (scale, maximum, subtraction, exponential, sum); each step of a row rescales its
        sum and its d_head_v outputs (d_head_v + 1), compares its maximum and exponentiates the difference
        (3); at the end each output is divided once (d_head_v). Rescales that are skipped count too.
        """
        rows = batch * heads * seq_len
        steps = -(-seq_len // self.B_c)
        per_row = 5 * seq_len + steps * (self.d_head_v + 4) + self.d_head_v
        return self.attn_flop(batch, heads, seq_len) + rows * per_row

    # ------------------------------------------------------------------ feasibility
    def malformed_reason(self) -> str | None:
        """Why no GPU can run this configuration, or None. C++ refuses the same by static_assert."""
        for name in ("d_head", "d_head_v"):
            if getattr(self, name) not in D_HEADS:
                return f"{name} is {getattr(self, name)}; this family has {', '.join(map(str, D_HEADS))}"
        if self.B_r % WARPGROUP_ROWS or self.n_consumers not in REGISTERS:
            return (
                f"B_r is {self.B_r}; each consumer warpgroup owns {WARPGROUP_ROWS} query rows and a block "
                f"has one to {max(REGISTERS)} of them, so it must be one of "
                f"{', '.join(str(n * WARPGROUP_ROWS) for n in REGISTERS)}"
            )
        if self.B_c not in PRODUCT_WIDTHS:
            return f"B_c is {self.B_c}; products are {', '.join(map(str, PRODUCT_WIDTHS))} columns wide"
        if not 2 <= self.kv_stages <= 8:
            return f"kv_stages is {self.kv_stages}; V's slot is in use while the next K is waited for: 2 to 8"
        if not 0 <= self.extra_k_stages <= 8 - self.kv_stages:
            return (
                f"extra_k_stages is {self.extra_k_stages}; with kv_stages of {self.kv_stages} it must be 0 "
                f"to {8 - self.kv_stages}"
            )
        if not 1 <= self.q_stages <= 4:
            return f"q_stages is {self.q_stages}; it must be 1 to 4"
        if not self.direct_store and _padded(self.d_head_v) > _padded(self.d_head):
            return (
                f"d_head_v is {self.d_head_v} and d_head {self.d_head}: O would not fit the Q slot it leaves "
                "through; choose direct_store"
            )
        if self.ping_pong and self.n_consumers < 2:
            return f"ping_pong: B_r is {self.B_r}, one warpgroup; turns need two or more"
        if self.early_pass and not (self.ping_pong and self.overlap_products):
            return "early_pass is about turns of two products: it needs ping_pong and overlap_products"
        if self.half_tiles and (not self.overlap_products or self.B_c // 2 not in PRODUCT_WIDTHS):
            return (
                f"half_tiles: B_c is {self.B_c}, and the first product is half as wide; it needs "
                "overlap_products and B_c of 96, 128, 160, 192 or 256"
            )
        if not 0 <= self.q_register_steps <= self.d_head // MMA_K:
            return (
                f"q_register_steps is {self.q_register_steps}; head size {self.d_head} has "
                f"{self.d_head // MMA_K} steps"
            )
        if not 0 <= self.prefetch_next <= MAX_PREFETCH:
            return f"prefetch_next is {self.prefetch_next}; it must be 0 to {MAX_PREFETCH}"
        if self.prefetch_next and self.n_consumers > 2:
            return (
                f"prefetch_next: B_r is {self.B_r}, and the load thread of more than two consumer warpgroups "
                "has no registers to spare; choose B_r of 64 or 128"
            )
        if self.section_heads < 0 or (self.section_heads and not self.head_sections):
            return f"section_heads is {self.section_heads}; it must be 0, or positive with head_sections"
        if self.forced_overlap and not self.overlap_products:
            return "forced_overlap needs overlap_products: there is no P V to keep the softmax under"
        if self.next_item != NextItem.NONE:
            if not self.overlap_products:
                return "next_item needs overlap_products: the next product starts while another runs"
            if not self.direct_store and self.q_stages < 2:
                return (
                    "next_item: O is staged in the old Q slot while the next Q is in use; choose q_stages of "
                    "2 or more, or direct_store"
                )
        if self.next_item == NextItem.AFTER_LAST_PV and self.q_stages < 2:
            return (
                "next_item AFTER_LAST_PV holds its turn while it waits for the next Q, and one Q slot "
                "would never be free; choose q_stages of 2 or more"
            )
        if self.softmax_reference == SoftmaxReference.ANCHORED:
            return "softmax_reference ANCHORED is of the Ampere family; choose LAGGED"
        budget = REGISTERS[self.n_consumers][1] - REGISTER_OVERHEAD[self.n_consumers]
        if self.resident_registers() > budget:
            return (
                f"S, P and O take {self.resident_registers()} registers a thread; {self.n_consumers} "
                f"consumer warpgroup(s) leave {budget}, and spilled accumulators let no products overlap"
            )
        return None

    def infeasible_reason(self, facts: DeviceFacts) -> str | None:
        """Why this configuration cannot run on the device, or None.

        Args:
            facts: the device, see ``flash_helpers.kernels.device_facts``.
        """
        if reason := self.malformed_reason():
            return reason
        if facts.capability != CAPABILITY:
            return (
                f"{facts.name} has compute capability {facts.capability[0]}.{facts.capability[1]}; wgmma "
                f"exists on {CAPABILITY[0]}.{CAPABILITY[1]} only"
            )
        if self.smem_bytes() > facts.smem_per_block:
            return (
                f"a block needs {self.smem_bytes()} bytes of shared memory; {facts.name} allows "
                f"{facts.smem_per_block}"
            )
        return None


def _padded(d_head: int) -> int:
    """Columns of a tile in shared memory."""
    return -(-d_head // PANEL_COLUMNS) * PANEL_COLUMNS
