"""The Ampere family: kernels built on ``mma.sync``, ``ldmatrix`` and ``cp.async`` (sm_80 and newer)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flash_helpers.configs.dtype import DType

MMA_M = 16  # rows of one mma.sync.m16n8k16 product
MMA_K = 16  # reduction length of one product: one "tile" of the *_mma_load_K_tiles fields
MMA_N = 8  # columns of one product
MAX_REGISTERS_PER_THREAD = 255


@dataclass(frozen=True, order=True)
class FlashForwardKernelConfig:
    """Every choice one Ampere-class forward kernel makes.

    The C++ struct of the same name has the same fields in the same order.

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
    """

    dtype: DType
    d_head: int
    B_r: int
    B_c: int
    n_warps: int
    async_copy: bool
    eager_load_blocks: bool
    swizzled: bool
    Q_mma_load_K_tiles: int
    K_mma_load_K_tiles: int
    V_mma_load_K_tiles: int
    mma_double_buffer_loads: bool
    optimized_softmax: bool

    # ------------------------------------------------------------------ names
    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """The kernel's id, e.g. ``(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax``.

        Args:
            include_d_head: show ``d_head`` in the tuple.
            include_tup: show the tuple ``(dtype, d_head, B_r, B_c, n_warps)`` at all.
        """
        flags = [
            "async" if self.async_copy else "",
            "eager" if self.eager_load_blocks else "",
            "swizzled" if self.swizzled else "",
            f"load_{self.Q_mma_load_K_tiles}_{self.K_mma_load_K_tiles}_{self.V_mma_load_K_tiles}_tiles",
            "buffer" if self.mma_double_buffer_loads else "",
            "opt_softmax" if self.optimized_softmax else "",
        ]
        text = "+".join(flag for flag in flags if flag)
        if not include_tup:
            return text
        d_head = f"{self.d_head}, " if include_d_head else ""
        return f"({self.dtype.name}, {d_head}{self.B_r}, {self.B_c}, {self.n_warps}): {text}"

    def to_cpp_struct(self) -> str:
        """The value as a C++ designated initializer: names and order are checked by the compiler."""
        values = []
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, DType):
                text = value.to_cpp_str()
            elif isinstance(value, bool):
                text = str(value).lower()
            else:
                text = str(value)
            values.append(f".{f.name} = {text}")
        return f"FlashForwardKernelConfig{{{', '.join(values)}}}"

    # ------------------------------------------------------------------ resources
    @property
    def n_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.n_warps

    def smem_bytes(self, elem_size: int = 2) -> int:
        """Shared memory of a block: one Q block, one K block and one V block, bytes."""
        return (self.B_r + 2 * self.B_c) * self.d_head * elem_size

    def num_ctas_per_sm(self, max_smem_bytes: int) -> int:
        """Blocks that fit one SM's shared memory of ``max_smem_bytes`` bytes."""
        return max_smem_bytes // self.smem_bytes()
