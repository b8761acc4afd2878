"""The Ampere family: kernels built on ``mma.sync``, ``ldmatrix`` and ``cp.async`` (sm_80 and newer)."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from flash_helpers.kernels.ampere.family import AMPERE
from flash_helpers.kernels.cpp_struct import designated_initializer
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.names import Name, flag, group, number, one_of, size
from flash_helpers.kernels.numeric_class import NumericClass
from flash_helpers.kernels.softmax import SOFTMAX_WORDS, SoftmaxReference
from flash_helpers.kernels.traits import PLAIN, ForwardTraits

MMA_M = 16  # rows of one mma.sync.m16n8k16 product
MMA_N = 8  # columns of one product
MMA_K = 16  # reduction length of one product: one "tile" of the *_mma_load_K_tiles fields
WARP_SIZE = 32
CHUNK_BYTES = 16  # one cp.async, one ldmatrix row
PANEL_COLUMNS = 64  # elements of a 128-byte row, the width of a tile in shared memory
D_HEADS = (64, 128, 192, 256)
MAX_STAGES = 8
MAX_WARPS = 32  # of a thread block
KEPT_BLOCKS = 2  # thread blocks of a multiprocessor that keep what chunks of keys have left, at most
BARRIER_BYTES = 128  # shared memory for the mbarriers of up to MAX_STAGES stages
TILES_WORD = "load_{}_{}_{}_tiles"


@dataclass(frozen=True, order=True)
class FlashForwardKernelConfig:
    """Every choice one Ampere-class forward kernel makes.

    The C++ struct of the same name is generated from this one.

    Attributes:
        dtype: element type of Q, K, V and O.
        d_head: head size, elements.
        B_r: query rows one thread block owns.
        B_c: key and value rows a block takes per step.
        n_warps: warps of a block; each owns ``B_r / n_warps`` query rows.
        async_copy: global to shared memory by ``cp.async``, else through registers.
        eager_load_blocks: the next K and V blocks are under way before the current ones are used up.
        swizzled: shared memory is XOR-swizzled, so that ``ldmatrix`` and the copies have no bank
            conflicts.
        Q_mma_load_K_tiles: 0: the warp's Q fragments stay in registers for the whole kernel;
            n: n tiles along d_head are loaded at a time, between the products.
        K_mma_load_K_tiles: 0: K's fragments of the whole block are loaded before S = Q K^T;
            n: n tiles along d_head at a time.
        V_mma_load_K_tiles: 0: V's fragments of the whole block are loaded before O += P V;
            n: n tiles along B_c at a time.
        mma_double_buffer_loads: the next tiles load while the current ones multiply.
        optimized_softmax: scale and log2(e) folded into one fused multiply-add before exp2, and
            the first step without the rescale.
        kv_stages: K and V blocks that shared memory holds; from 2 on whole blocks are under way ahead of
            their use.
        mbarrier: warps wait for copies and for free stages by ``mbarrier`` instead of a barrier of the whole
            thread block, and drift apart by up to ``kv_stages - 1`` blocks.
        softmax_reference: see ``SoftmaxReference``.
        tensor_row_sums: the tensor cores sum the rows of P, rounded as it is multiplied. Such a kernel
            writes no LSE: 5e-4 to 4e-3 would be wrong in it.
        fragments_ahead: 0: operands are loaded as the three ``*_tiles`` fields say; n: K's and V's come one
            ``ldmatrix`` at a time, n of them ahead of their products.
        paired_warps: two warps share their query rows and halve ``d_head`` in both products, so that each
            fragment of K and V is read for twice as many rows; they exchange scores and P.
        chunk_tiles: tiles of a chunk of keys: at each multiple of them a row begins anew, and chunks are
            joined from the last to the first, by one block or behind several; 0: all keys are one chunk.
    """

    dtype: DType = size()
    d_head: int = size()
    B_r: int = size()
    B_c: int = size()
    n_warps: int = size()
    async_copy: bool = flag("async")
    eager_load_blocks: bool = flag("eager")
    swizzled: bool = flag("swizzled")
    Q_mma_load_K_tiles: int = group(TILES_WORD)
    K_mma_load_K_tiles: int = group(TILES_WORD)
    V_mma_load_K_tiles: int = group(TILES_WORD)
    mma_double_buffer_loads: bool = flag("buffer")
    optimized_softmax: bool = flag("opt_softmax")
    kv_stages: int = number("kv_stages", 1)
    mbarrier: bool = flag("mbarrier", False)
    softmax_reference: SoftmaxReference = one_of(SOFTMAX_WORDS, SoftmaxReference.EXACT)
    tensor_row_sums: bool = flag("tensor_row_sums", False)
    fragments_ahead: int = number("fragments_ahead", 0)
    paired_warps: bool = flag("paired_warps", False)
    chunk_tiles: int = number("chunk", 0)

    # ------------------------------------------------------------------ names
    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """The kernel's id.

        For example ``(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax``.

        Args:
            include_d_head: show ``d_head`` in the tuple.
            include_tup: show the tuple ``(dtype, d_head, B_r, B_c, n_warps)`` at all.
        """
        return NAME.write(self, include_d_head, include_tup)

    def kernel_name(self) -> str:
        """The C++ kernel that this value instantiates, as a demangler prints its template name."""
        return f"flash::flash_forward_kernel<{self.to_cpp_struct()}>"

    def to_cpp_struct(self) -> str:
        """The value as a C++ designated initializer."""
        return designated_initializer(self)

    # ------------------------------------------------------------------ resources
    @property
    def d_head_v(self) -> int:
        """Head size of V and O, elements: that of Q and K."""
        return self.d_head

    @property
    def mask_groups(self) -> int:
        """Into how many groups of rows bits of a mask's tiles are divided."""
        return 1

    @property
    def n_threads(self) -> int:
        """Threads of a block."""
        return WARP_SIZE * self.n_warps

    @property
    def warps_per_group(self) -> int:
        """Warps that share query rows, each with its part of ``d_head``."""
        return 2 if self.paired_warps else 1

    @property
    def rows_per_warp(self) -> int:
        """Query rows one warp owns, alone or with the other of its pair."""
        return self.B_r * self.warps_per_group // self.n_warps

    def smem_bytes(self, elem_size: int = 2) -> int:
        """Shared memory of a block: Q, a K and a V block each stage, barriers, pairs' boxes; bytes."""
        tiles = (self.B_r + 2 * self.kv_stages * self.B_c) * self.d_head * elem_size
        boxes = self.B_r * self.B_c * 4 if self.paired_warps else 0  # scores in float32
        return tiles + (BARRIER_BYTES if self.mbarrier else 0) + boxes

    def num_ctas_per_sm(self, max_smem_bytes: int) -> int:
        """Blocks that fit one SM's shared memory of ``max_smem_bytes`` bytes."""
        return max_smem_bytes // self.smem_bytes()

    @property
    def numeric_class(self) -> NumericClass:
        """What the bits of a row depend on. Warps, stages, how fragments are loaded: nothing of these."""
        return NumericClass(
            products="mma.sync",
            dtype=self.dtype,
            key_tile=self.B_c,
            reference=self.softmax_reference.name.lower(),
            exponent="fused" if self.optimized_softmax else "scaled",
            row_sums="tensor" if self.tensor_row_sums else "lanes",
            head_parts=self.warps_per_group,
            chunk_tiles=self.chunk_tiles,
        )

    def kept_sums(self, sm_count: int) -> int:
        """Floats of memory in which the thread blocks of ``sm_count`` multiprocessors keep what chunks of
        keys have left.
        """
        return sm_count * KEPT_BLOCKS * self.B_r * (self.d_head + 8) if self.chunk_tiles else 0

    @property
    def writes_lse(self) -> bool:
        """Whether the kernel can write the log-sum-exp of each row."""
        return not self.tensor_row_sums

    def resident_registers(self) -> int:
        """32-bit registers a thread holds through the whole main loop: O and S in float32, and Q if held.

        P replaces S in place. Streamed fragments, addresses, row statistics and temporaries come on top;
        how many of those live at once is the compiler's choice.
        """
        columns = self.d_head // self.warps_per_group
        accumulators = self.rows_per_warp * (columns + self.B_c) // WARP_SIZE
        held_q = self.rows_per_warp * columns // (2 * WARP_SIZE) if self.Q_mma_load_K_tiles == 0 else 0
        return accumulators + held_q

    # ------------------------------------------------------------------ work
    def attn_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """FLOP of the two matrix products, every key visible: 4 · batch · heads · seq_len² · d_head."""
        return 4 * batch * heads * seq_len * seq_len * self.d_head

    def total_flop(self, batch: int, heads: int, seq_len: int) -> int:
        """``attn_flop`` plus the softmax work of this tiling.

        A score costs 5 (scale, maximum, subtraction, exponential, sum); each step of a row rescales its
        sum and its d_head outputs (d_head + 1) and compares its maximum and exponentiates the difference
        (3); at the end each output is divided once (d_head).
        """
        rows = batch * heads * seq_len
        steps = -(-seq_len // self.B_c)
        per_row = 5 * seq_len + steps * (self.d_head + 4) + self.d_head
        return self.attn_flop(batch, heads, seq_len) + rows * per_row

    @property
    def products_per_block(self) -> int:
        """Instructions ``mma.sync`` of one warp for one K/V block."""
        row_tiles = self.rows_per_warp // MMA_M
        columns = self.d_head // self.warps_per_group
        products = 2 * (columns // MMA_K) * (self.B_c // MMA_N)  # Q K^T and P V
        return row_tiles * (products + (self.B_c // MMA_K if self.tensor_row_sums else 0))

    # ------------------------------------------------------------------ feasibility
    def malformed_reason(self, traits: ForwardTraits = PLAIN) -> str | None:
        """Why no GPU can run this configuration compiled for some traits, or None.

        C++ refuses the same by ``static_assert``.
        """
        if self.d_head not in D_HEADS:
            return f"d_head is {self.d_head}; this family has {', '.join(map(str, D_HEADS))}"
        for name in ("B_r", "B_c", "n_warps"):
            if getattr(self, name) <= 0:
                return f"{name} is {getattr(self, name)}; it must be positive"
        if self.n_warps % 2 or self.n_warps > MAX_WARPS:
            return (
                f"n_warps is {self.n_warps}; it must be even, so that a copy pass covers the 8 rows "
                f"after which the swizzle repeats, and at most {MAX_WARPS}"
            )
        least_rows = self.n_warps * MMA_M // self.warps_per_group
        if self.B_r % least_rows:
            return (
                f"B_r is {self.B_r} with {self.n_warps} warps: each warp must own a multiple of {MMA_M} "
                f"query rows, so B_r must be a multiple of {least_rows}"
            )
        rows_per_pass = self.n_threads * CHUNK_BYTES // (PANEL_COLUMNS * self.dtype.itemsize)
        step = lcm(rows_per_pass, MMA_K)
        for name in ("B_r", "B_c"):
            if getattr(self, name) % step:
                return (
                    f"{name} is {getattr(self, name)}; {self.n_threads} threads copy {rows_per_pass} rows "
                    f"of {PANEL_COLUMNS} elements at a time, and products take {MMA_K}, so it must be a "
                    f"multiple of {step}"
                )
        for name, length in (("Q", self.d_head), ("K", self.d_head), ("V", self.B_c)):
            tiles, per_load = length // MMA_K, getattr(self, f"{name}_mma_load_K_tiles")
            if per_load < 0 or (per_load and tiles % per_load):
                return (
                    f"{name}_mma_load_K_tiles is {per_load}; it must be 0 or divide the {tiles} tiles of "
                    f"{MMA_K} along the reduction of {length}"
                )
        q_tiles, k_tiles = self.Q_mma_load_K_tiles, self.K_mma_load_K_tiles
        if q_tiles and k_tiles and q_tiles != k_tiles:
            return (
                f"Q_mma_load_K_tiles is {q_tiles} and K_mma_load_K_tiles is {k_tiles}: operands of one "
                "product that are both streamed must advance together; make them equal or one of them 0"
            )
        if self.eager_load_blocks and not self.async_copy:
            return "eager_load_blocks needs async_copy: copies through registers cannot be under way"
        return (
            self._malformed_pipeline()
            or self._malformed_softmax()
            or self._malformed_pairs()
            or self._malformed_traits(traits)
        )

    def _malformed_traits(self, traits: ForwardTraits) -> str | None:
        if traits.paged and not self.async_copy:
            return "paged: pages are copied asynchronously, which the kernel does not do; choose async_copy"
        if reason := traits.planned_obstacle():
            return reason
        if not (traits.split or traits.planned):
            return None
        name = "split" if traits.split else "planned"
        if self.paired_warps:
            return f"{name}: parts of split keys are not made for paired_warps"
        if self.softmax_reference == SoftmaxReference.ANCHORED:
            return (
                f"{name}: an ANCHORED softmax_reference is recomputed over other blocks of keys than a "
                "part's; choose another softmax_reference"
            )
        if self.tensor_row_sums:
            return f"{name}: parts are combined by their LSE, which tensor_row_sums does not give"
        return None

    def _malformed_pipeline(self) -> str | None:
        if not 1 <= self.kv_stages <= MAX_STAGES:
            return f"kv_stages is {self.kv_stages}; it must be 1 to {MAX_STAGES}"
        if self.kv_stages > 1 and not self.eager_load_blocks:
            return (
                f"kv_stages is {self.kv_stages}: stages beyond the first need async_copy and "
                "eager_load_blocks"
            )
        if self.mbarrier and self.kv_stages == 1:
            return "mbarrier needs kv_stages of 2 or more: with one stage warps cannot drift apart"
        if not 0 <= self.fragments_ahead <= self.B_c // MMA_K:
            return (
                f"fragments_ahead is {self.fragments_ahead}; it must be 0 to {self.B_c // MMA_K}, the "
                "fragments of K that one step along d_head needs"
            )
        tiles = (self.Q_mma_load_K_tiles, self.K_mma_load_K_tiles, self.V_mma_load_K_tiles)
        single = tiles[0] in (0, 1) and tiles[1:] == (1, 1) and not self.mma_double_buffer_loads
        if self.fragments_ahead and not single:
            return (
                f"fragments_ahead is {self.fragments_ahead} with loads of {tiles} tiles: it loads fragment "
                "by fragment; make K's and V's tiles 1, Q's 0 or 1, and mma_double_buffer_loads False"
            )
        return None

    def _malformed_pairs(self) -> str | None:
        if not self.paired_warps:
            return None
        if self.d_head % (2 * PANEL_COLUMNS) or self.B_c % (2 * MMA_K) or not self.fragments_ahead:
            return (
                f"paired_warps with d_head {self.d_head}, B_c {self.B_c} and fragments_ahead "
                f"{self.fragments_ahead}: it halves the first, a multiple of {2 * PANEL_COLUMNS}, and the "
                f"second, a multiple of {2 * MMA_K}, and needs fragments_ahead"
            )
        if self.softmax_reference == SoftmaxReference.LAGGED:
            return (
                "paired_warps and softmax_reference LAGGED: growth would be seen by one warp of a pair only; "
                "choose EXACT_SKIP_RESCALE, or ANCHORED for BF16"
            )
        return None

    def _malformed_softmax(self) -> str | None:
        reference = self.softmax_reference
        if reference == SoftmaxReference.LAGGED_BY_ROW:
            return (
                "softmax_reference LAGGED_BY_ROW is of the Hopper family; EXACT and EXACT_SKIP_RESCALE treat "
                "each row by itself"
            )
        if reference != SoftmaxReference.EXACT and not self.optimized_softmax:
            return f"softmax_reference {reference.name} needs optimized_softmax"
        if reference == SoftmaxReference.ANCHORED and self.dtype != DType.BF16:
            return "softmax_reference ANCHORED needs BF16: P grows beyond what FP16 can hold; choose LAGGED"
        exact = reference in (SoftmaxReference.EXACT, SoftmaxReference.EXACT_SKIP_RESCALE)
        alone = exact and self.optimized_softmax and not (self.tensor_row_sums or self.paired_warps)
        if self.chunk_tiles < 0 or (self.chunk_tiles and not alone):
            return (
                f"chunk_tiles is {self.chunk_tiles}; it must be 0, or positive with optimized_softmax, a "
                "softmax_reference EXACT or EXACT_SKIP_RESCALE, and neither tensor_row_sums nor paired_warps"
            )
        return None

    def infeasible_reason(self, facts: DeviceFacts, traits: ForwardTraits = PLAIN) -> str | None:
        """Why this configuration, compiled for some traits, cannot run on the device, or None.

        Args:
            facts: the device, see ``flash_helpers.kernels.device_facts``.
            traits: what the kernel is compiled for.
        """
        return (
            self.malformed_reason(traits)
            or AMPERE.unable_reason(facts)
            or facts.smem_obstacle(self.smem_bytes())
        )


NAME = Name(
    FlashForwardKernelConfig,
    "kernel",
    "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
)
