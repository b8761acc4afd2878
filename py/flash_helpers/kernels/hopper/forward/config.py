"""The forward pass of the Hopper family: what one kernel chooses, on TMA, ``mbarrier`` and ``wgmma``."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.cpp_struct import designated_initializer
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.family import HOPPER
from flash_helpers.kernels.hopper.forward import resources
from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.hopper.forward.rules import MMA_K, malformed_reason
from flash_helpers.kernels.names import Name, flag, number, one_of, size
from flash_helpers.kernels.numeric_class import NumericClass
from flash_helpers.kernels.softmax import SOFTMAX_WORDS, SoftmaxReference
from flash_helpers.kernels.traits import PLAIN, ForwardTraits

NEXT_ITEM_WORDS = {
    NextItem.NONE: "",
    NextItem.WITH_LAST_PV: "next_with_pv",
    NextItem.AFTER_LAST_PV: "next_after_pv",
}


@dataclass(frozen=True, order=True)
class HopperForwardKernelConfig:
    """Every choice one Hopper-class forward kernel makes.

    The C++ struct of the same name is generated from this one.

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
        chunk_tiles: tiles of a chunk of keys: at each multiple of them a row begins anew, and chunks are
            joined from the last to the first, by one block or behind several; 0: all keys are one chunk.
        keys_once: the L2 cache drops K and V first, which no other block reads; else it keeps them longest.
    """

    dtype: DType = size()
    d_head: int = size()
    d_head_v: int = size(after="d_head")
    B_r: int = size()
    B_c: int = size()
    kv_stages: int = number("kv")
    q_stages: int = number("q")
    overlap_products: bool = flag("overlap")
    ping_pong: bool = flag("ping_pong")
    softmax_reference: SoftmaxReference = one_of(SOFTMAX_WORDS)
    forced_overlap: bool = flag("forced_overlap")
    next_item: NextItem = one_of(NEXT_ITEM_WORDS)
    direct_store: bool = flag("direct")
    dynamic_schedule: bool = flag("dynamic")
    head_sections: bool = flag("sections")
    early_pass: bool = flag("early_pass", False)
    trimmed: bool = flag("trimmed", False)
    paired_blocks: bool = flag("paired", False)
    half_tiles: bool = flag("half_tiles", False)
    section_heads: int = number("heads", 0)
    prefetch_next: int = number("prefetch", 0)
    extra_k_stages: int = number("more_k", 0)
    q_register_steps: int = number("q_regs", 0)
    chunk_tiles: int = number("chunk", 0)
    keys_once: bool = flag("keys_once", False)

    # ------------------------------------------------------------------ names
    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """The kernel's id, e.g. ``(BF16, 128, 128, 128, 2wg): tma+kv_2+q_2+overlap+ping_pong+lagged``.

        Args:
            include_d_head: show ``d_head`` (``d_head/d_head_v`` where they differ) in the tuple.
            include_tup: show the tuple ``(dtype, d_head, B_r, B_c, consumer warpgroups)`` at all.
        """
        return NAME.write(self, include_d_head, include_tup)

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
        return self.B_r // resources.WARPGROUP_ROWS

    @property
    def mask_groups(self) -> int:
        """Into how many groups of rows bits of a mask's tiles are divided: one a consumer warpgroup."""
        return self.n_consumers

    @property
    def n_threads(self) -> int:
        """Threads of a block: the producer warpgroup and the consumers."""
        return (1 + self.n_consumers) * resources.WARPGROUP_SIZE

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

    @property
    def numeric_class(self) -> NumericClass:
        """What the bits of a row depend on. Paired blocks, turns, order of items: nothing of these."""
        return NumericClass(
            products="wgmma",
            dtype=self.dtype,
            key_tile=self.B_c,
            reference=self.softmax_reference.name.lower(),
            exponent="fused",
            row_sums="lanes",
            softcap="element" if self.softmax_reference is SoftmaxReference.LAGGED_BY_ROW else "warp",
            chunk_tiles=self.chunk_tiles,
        )

    def kept_sums(self, sm_count: int) -> int:
        """Floats of memory in which the thread blocks of ``sm_count`` multiprocessors, one each, keep what
        chunks of keys have left, beyond what their shared memory holds.
        """
        return resources.kept_sums(self, sm_count)

    def smem_bytes(self, elem_size: int = 2) -> int:
        """Shared memory of a block: Q slots, K and V rings (columns padded to 64), what chunks of keys have
        left, as far as there is room, and barriers; bytes.
        """
        return resources.smem_bytes(self, elem_size)

    def num_ctas_per_sm(self, max_smem_bytes: int) -> int:
        """Blocks an SM of ``max_smem_bytes`` bytes runs: one, if it fits; blocks take all registers."""
        return int(self.smem_bytes() <= max_smem_bytes)

    def resident_registers(self) -> int:
        """32-bit registers a consumer thread holds through the main loop."""
        return resources.resident_registers(self)

    # ------------------------------------------------------------------ work
    @property
    def products_per_block(self) -> int:
        """Instructions ``wgmma`` of one warpgroup for one K/V block: steps of Q K^T, then of P V."""
        return self.d_head // MMA_K + self.B_c // MMA_K

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
    def register_budget(self, traits: ForwardTraits = PLAIN) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer, compiled for some traits."""
        return resources.register_budget(self, traits)

    def malformed_reason(self, traits: ForwardTraits = PLAIN) -> str | None:
        """Why no GPU can run this configuration compiled for some traits, or None.

        C++ refuses the same by ``static_assert``, but for the registers, which ptxas would spill.
        """
        return malformed_reason(self, traits)

    def infeasible_reason(self, facts: DeviceFacts, traits: ForwardTraits = PLAIN) -> str | None:
        """Why this configuration, compiled for some traits, cannot run on the device, or None.

        Args:
            facts: the device, see ``flash_helpers.kernels.device_facts``.
            traits: what the kernel is compiled for.
        """
        return (
            self.malformed_reason(traits)
            or HOPPER.unable_reason(facts)
            or facts.smem_obstacle(self.smem_bytes())
        )


NAME = Name(
    HopperForwardKernelConfig,
    "Hopper kernel",
    "(BF16, 128, 128, 128, 2wg): tma+kv_2+q_2+overlap+ping_pong+lagged+sections",
    lead=("tma",),
    derived=(("n_consumers", "{}wg"),),
)
