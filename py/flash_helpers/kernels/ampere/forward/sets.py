"""Named sets of Ampere-family configurations: the ladder, the tuning space, what is built ahead of time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from flash_helpers import environment
from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.dtype import DType

TUNED_D_HEADS = (64, 128)

BLOCK_SIZES = (  # (B_r, B_c, n_warps)
    (64, 32, 4),
    (64, 64, 4),
    (64, 128, 4),
    (128, 32, 4),
    (128, 64, 4),
    (128, 128, 4),
    (128, 32, 8),
    (128, 64, 8),
    (128, 128, 8),
)

# Registers a thread needs next to O, S and a held Q: the fragments in use, addresses, row maxima and sums.
REGISTER_OVERHEAD = 60
MAX_REGISTERS = 255
SM_REGISTERS = 65536

LADDER = (
    # what the step adds, then (eager, swizzled, Q tiles, K tiles, V tiles, buffer, opt_softmax)
    ("base", (False, False, 0, 0, 0, False, False)),
    ("swizzled", (False, True, 0, 0, 0, False, False)),
    ("eager block loads", (True, True, 0, 0, 0, False, False)),
    ("fragments streamed", (True, True, 2, 2, 2, False, False)),
    ("fragments double-buffered", (True, True, 2, 2, 2, True, False)),
    ("optimized softmax", (True, True, 2, 2, 2, True, True)),
    ("tuned", (True, True, 0, 2, 2, False, True)),
)


def should_autotune_config(cfg: FlashForwardKernelConfig) -> bool:
    """Whether a configuration is worth the tuner's time."""
    return skip_autotune_reason(cfg) is None


def skip_autotune_reason(cfg: FlashForwardKernelConfig) -> str | None:
    """Why a configuration is left out of the tuning space, or None."""
    if reason := cfg.malformed_reason():
        return reason  # among them: eager without async, Q's and K's tile counts that differ
    if cfg.mma_double_buffer_loads and not cfg.K_mma_load_K_tiles and not cfg.V_mma_load_K_tiles:
        return "nothing is streamed, so there is nothing to double-buffer"
    if cfg.d_head == 128:
        held = cfg.Q_mma_load_K_tiles == 0
        if (cfg.B_r, cfg.n_warps) == (64, 8):
            return "8 warps would own 8 rows each, half of an mma tile"
        if (cfg.B_r, cfg.B_c) == (64, 32) and held:
            # 64 (O) + 16 (S) + 32 (Q) + fragments pass 168 registers, so only 2 blocks run on an SM. The
            # tile's 32 KiB would allow 5 on an A100, and more blocks are all that so small a tile offers.
            return "holding Q takes the registers that the third block per SM needs"
        if (cfg.B_r, cfg.B_c) == (64, 64) and not held:
            # 64 (O) + 32 (S) + 32 (Q) fit the 255 registers of 2 blocks per SM, which is also what 48 KiB
            # of shared memory leave on GPUs with 100 KiB: streaming Q only reads it again each step.
            return "Q fits the registers, streaming it only adds shared-memory reads"
        if cfg.B_r == 128 and held:
            # 4 warps: 128 (O) + 64 (S) + 64 (Q) = 256 registers, more than a thread has. 8 warps: 2 blocks
            # per SM leave a thread 128 registers, and O, S and Q of 16 rows alone take 128.
            budget = min(MAX_REGISTERS, SM_REGISTERS // (2 * cfg.n_threads))
            return (
                f"O, S and a held Q take {cfg.resident_registers()} of the register budget of {budget} that "
                "two blocks per SM leave a thread: Q is streamed at this tile"
            )
    if not cfg.eager_load_blocks and (cfg.B_c, cfg.n_warps) == (128, 4):
        # V's 32 rows a warp are copied while S is whole in registers: 32 more for addresses and what the
        # compiler has loaded ahead, twice that with two buffers.
        copies = 32 * (2 if cfg.mma_double_buffer_loads else 1)
        if cfg.resident_registers() + REGISTER_OVERHEAD + copies > MAX_REGISTERS:
            return "copies between the products need registers that S, O and Q have taken: it would spill"
    if cfg.resident_registers() + REGISTER_OVERHEAD > MAX_REGISTERS:
        return (
            f"O, S and Q alone take {cfg.resident_registers()} of {MAX_REGISTERS} registers: it would spill"
        )
    return None


def get_autotuning_kernel_configs(
    dtypes: Iterable[DType] = (DType.FP16, DType.BF16),
) -> list[FlashForwardKernelConfig]:
    """The tuning space: block sizes x eager x Q held or streamed x double buffering.

    ``async``, ``swizzled`` and ``opt_softmax`` are on throughout: the ladder shows that they always gain.

    Args:
        dtypes: element types.

    Returns:
        Configurations of head sizes 64 and 128 that are well formed and that ``skip_autotune_reason`` leaves
        in, each once.
    """
    configs = (
        FlashForwardKernelConfig(
            dtype, d_head, B_r, B_c, n_warps, True, eager, True, q_tiles, 2, 2, buffer, True
        )
        for dtype, d_head, (B_r, B_c, n_warps), eager, q_tiles, buffer in itertools.product(
            dtypes, TUNED_D_HEADS, BLOCK_SIZES, (False, True), (0, 2), (False, True)
        )
    )
    return [cfg for cfg in configs if should_autotune_config(cfg)]


def get_kernel_progression_configs(all_block_sizes: bool = False) -> list[FlashForwardKernelConfig]:
    """The ladder: each step of optimisation as a configuration, for fp16 and head size 128.

    Args:
        all_block_sizes: the ladder for every feasible block size (B_r, B_c, n_warps), not only (64, 64, 4).

    Returns:
        The steps in order, block size by block size; those that are malformed for a block size are left out.
    """
    sizes = BLOCK_SIZES if all_block_sizes else ((64, 64, 4),)
    configs = [
        FlashForwardKernelConfig(
            DType.FP16, 128, B_r, B_c, n_warps, True, eager, swizzled, q, k, v, buffer, opt_softmax
        )
        for B_r, B_c, n_warps in sizes
        for _, (eager, swizzled, q, k, v, buffer, opt_softmax) in LADDER
    ]
    return [cfg for cfg in configs if cfg.malformed_reason() is None]


def get_kernels_to_build() -> list[FlashForwardKernelConfig]:
    """What is built ahead of time: the ladder and the tuning space, sorted, each once."""
    return sorted({*get_kernel_progression_configs(), *get_autotuning_kernel_configs()})


def get_kernel_configs(key: str = "") -> list[FlashForwardKernelConfig]:
    """The set that a key names.

    Args:
        key: ``prog`` or any longer word that starts with it: the ladder, with ``all`` in it for every
            block size; ``all``: everything that is built; ``tune``: the tuning space; ``"B_r,B_c"``:
            what is built for these block sizes. Empty: the environment variable ``KERNELS``, or ``all``.

    Raises:
        ValueError: no such set, or no built configuration has these block sizes.
    """
    key = (key or environment.kernel_set() or "all").strip().lower()
    if key.startswith("prog"):
        return get_kernel_progression_configs(all_block_sizes="all" in key)
    if key == "all":
        return get_kernels_to_build()
    if key == "tune":
        return get_autotuning_kernel_configs()
    parts = [part.strip() for part in key.split(",")]
    if len(parts) == 2 and all(part.isdigit() for part in parts):
        B_r, B_c = map(int, parts)
        if found := [cfg for cfg in get_kernels_to_build() if (cfg.B_r, cfg.B_c) == (B_r, B_c)]:
            return found
    sizes = sorted({f"{cfg.B_r},{cfg.B_c}" for cfg in get_kernels_to_build()})
    raise ValueError(
        f"no set of kernels is named {key!r}; valid: 'prog' (the ladder), 'prog_all' (for every block "
        f"size), 'tune', 'all', or block sizes 'B_r,B_c' out of {'; '.join(sizes)}"
    )
